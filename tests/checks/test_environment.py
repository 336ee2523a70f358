"""Environment variables: read, or ignored with a warning."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from taktline.checks import seconds_in_environment

NAME = "TAKTLINE_STALL_SECONDS"


@pytest.mark.parametrize(("text", "seconds"), [("5", 5.0), (" 0.5 ", 0.5), ("1e3", 1000.0)])
def test_seconds(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv(NAME, text)
    assert seconds_in_environment(NAME, 60.0) == seconds


@pytest.mark.parametrize("text", ["abc", "", "nan", "inf", "-1", "0", "5s", "9" * 5000])
def test_what_is_no_number_of_seconds(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(NAME, text)
    with pytest.warns(RuntimeWarning, match="SECONDS=.* is ignored: it must be a number of sec"):
        assert seconds_in_environment(NAME, 60.0) == 60.0


@pytest.mark.processes
def test_a_mistake_does_not_keep_anybody_from_importing() -> None:
    code = "from taktline.runtime import watchdog; print(watchdog.STALL_SECONDS)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, NAME: "abc"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "60.0\n"
    assert "TAKTLINE_STALL_SECONDS='abc' is ignored" in done.stderr
