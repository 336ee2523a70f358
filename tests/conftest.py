"""Settings for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.workers import Workers

# No deadline: tests assert nothing about time. On CI the same examples each time, so that what
# fails there fails for its change; everywhere else new ones, to find what nobody thought of.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Processes for the tests that communicate: one pool for all, started by the first of them."""
    # Here, because most tests need no torch.
    from tests.workers import Workers

    pool = Workers()
    try:
        yield pool
    finally:
        pool.stop()
