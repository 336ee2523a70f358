"""Environment variables: read, or ignored with a warning."""

from __future__ import annotations

import importlib.util

import pytest

import taktline.runtime  # noqa: F401  # its import reads the variable, too
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


def test_a_mistake_does_not_keep_anybody_from_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "abc")
    spec = importlib.util.find_spec("taktline.runtime.watchdog")
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    with pytest.warns(RuntimeWarning, match="TAKTLINE_STALL_SECONDS='abc' is ignored"):
        spec.loader.exec_module(again)
    assert again.STALL_SECONDS == 60.0
