"""Settings for all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.limits import TooLong, at_most

if TYPE_CHECKING:
    from tests.workers import Workers

# No deadline: tests assert nothing about time. On CI the same examples each time, so that what
# fails there fails for its change; everywhere else new ones, to find what nobody thought of.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# Before torch is loaded: some of its threads ask for no other number, see tests/settled.py.
os.environ["OMP_NUM_THREADS"] = "1"

TEST_SECONDS = 300
"""What a test may take before it fails, unless it is marked with a ``limit`` of its own.

Its fixtures have the same again. Where Python cannot raise, as in a wait of C++,
``faulthandler_timeout`` ends the whole run later.
"""

_SETTLED = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most cases of tests that are marked ``sampled`` to the matrix."""
    seen = Counter[str]()
    for item in items:
        if (marker := item.get_closest_marker("sampled")) is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % marker.args[0]:
                item.add_marker("matrix")
            seen[test] += 1


def pytest_collection_finish() -> None:
    """Let no garbage collection look again at what was imported: that takes half a second."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end of the program, libraries look for what is left of them."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Settle torch before the first test that has it; most need none, and do not load it."""
    if "torch" in sys.modules and not item.session.stash.get(_SETTLED, False):
        from tests.settled import settle

        settle()
        item.session.stash[_SETTLED] = True
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _limited(item))


def _limited(item: pytest.Item) -> Generator[None, object, object]:
    """Let no test take for ever, whether or not there is somebody to press Ctrl-C."""
    marker = item.get_closest_marker("limit")
    seconds = TEST_SECONDS if marker is None else marker.args[0]
    try:
        with at_most(seconds):
            return (yield)
    except TooLong as error:
        raise TimeoutError(f"{error}; if the test needs more, mark it with a limit") from error


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


@pytest.fixture(scope="session")
def commands() -> Iterator[Path]:
    """A folder with a ``python`` and a ``taktline`` that start quickly, see tests/warm.py."""
    from tests import warm

    with warm.commands() as folder:
        yield folder
