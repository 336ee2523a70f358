"""Every test ends: by a limit that works without Ctrl-C, in every test of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.limits import TooLong, at_most

ENDLESS = """
import time
import pytest

@pytest.mark.limit(0.5)
def test_endless() -> None:
    try:
        time.sleep(600)
    except Exception:
        time.sleep(600)

@pytest.fixture
def endless():
    time.sleep(600)

@pytest.mark.limit(0.5)
def test_endless_fixture(endless) -> None:
    assert True

@pytest.fixture
def endless_end():
    yield
    time.sleep(600)

@pytest.mark.limit(0.5)
def test_endless_end(endless_end) -> None:
    assert True

def test_after_them() -> None:
    assert True
"""


def test_limits_within_limits() -> None:
    def inner() -> None:
        with pytest.raises(TooLong, match=r"no end within 0\.1 s"), at_most(0.1):
            time.sleep(60)
        time.sleep(60)

    with pytest.raises(TooLong, match=r"no end within 0\.4 s"), at_most(0.4):
        inner()


@pytest.mark.processes
def test_a_test_that_does_not_end_fails_also_where_ctrl_c_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "test_endless.py").write_text(ENDLESS)
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert "\nFE.E. " in f"\n{done.stdout}", done.stdout + done.stderr
    assert len(re.findall(r"E +TimeoutError: no end within 0\.5 s", done.stdout)) == 3


def test_this_very_test_has_a_limit() -> None:
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    assert 0 < left <= 300
