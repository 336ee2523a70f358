"""What README and docs show is what the examples print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import PAGES, ROOT, fresh


@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_print_what_is_shown(page: Path) -> None:
    assert fresh(page) == page.read_text(), "refresh with: python -m tests.documents"
