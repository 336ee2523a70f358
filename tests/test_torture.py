"""A small part of the torture, the same each time; ``make torture`` runs as much as you like."""

from __future__ import annotations

import pytest

from tests.runtime.conftest import one_thread
from tests.torture.case import draw
from tests.torture.verdict import judge
from tests.workers import Workers

__all__ = ["one_thread"]

RANKS = 4
CASES = [*(f"local-{n}" for n in range(40)), *(f"gloo-{n}" for n in range(15))]


@pytest.mark.processes
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", CASES)
def test_nothing_hangs_and_nothing_is_wrong(workers: Workers, name: str) -> None:
    case = draw(name, RANKS)
    verdict = judge(workers, case, timeout=60.0)
    assert not verdict.wrong, f"{case}\n{verdict}"
