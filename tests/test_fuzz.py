"""A small part of the fuzzing, the same each time; ``make torture`` runs as much as you like."""

from __future__ import annotations

import time
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from taktline.errors import TaktlineError
from tests.fuzz.run import load, names, run


@pytest.mark.parametrize("name", names())
def test_no_error_that_is_not_ours(name: str) -> None:
    *_, outcome = run(load(name), range(200))
    assert outcome.inputs == 200
    assert outcome.refused > 20, "inputs that nothing is wrong with find nothing"
    assert not outcome.wrong, "\n".join(f"input {seed}\n{text}" for seed, text in outcome.failures)


def target(try_: Any) -> Any:
    return SimpleNamespace(draw=lambda random: random.random(), try_=try_)


def test_other_errors_are_failures() -> None:
    def fail(number: float) -> None:
        raise (TaktlineError if number < 0.5 else KeyError)(number)

    *_, outcome = run(target(fail), range(50))
    assert outcome.refused + len(outcome.failures) == outcome.inputs == 50
    assert outcome.refused
    assert outcome.wrong
    seed, text = outcome.failures[0]
    assert "KeyError" in text
    with pytest.raises(KeyError):
        fail(Random(seed).random())


def test_a_hang_is_a_failure() -> None:
    def hang(number: float) -> None:
        try:
            time.sleep(60)
        except Exception:  # as some library may
            time.sleep(60)

    *_, outcome = run(target(hang), range(1), seconds=0.2)
    assert "no end within 0.2 s" in outcome.failures[0][1]
