"""Calls for all ranks, made by some of them: a sentence on every rank, and the next call works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import taktline as tl
from taktline.errors import StallError
from tests.checkpoint.training import Data, Training, mesh_of, pipeline
from tests.workers import Workers

pytestmark = pytest.mark.processes

TOKENS, TARGET = Data().batch()


def calls(training: Training, runs: str) -> dict[str, Callable[[], object]]:
    pipe = training.pipe
    assert isinstance(pipe, tl.Pipeline)

    def traced() -> None:
        with pipe.trace():
            pipe.step(TOKENS, target=TARGET)

    return {
        "state_dict(gathered=True)": lambda: pipe.state_dict(gathered=True),
        "save()": lambda: training.save(runs),
        "load()": lambda: training.load(runs),
        "clip_grad_norm_": lambda: pipe.clip_grad_norm_(1.0),
        "a GradScaler's step": lambda: pipe._built.ranks.on_any_rank(False, "a GradScaler's step"),
        "trace": traced,
        "eval()": lambda: pipe.eval(TOKENS, target=TARGET),
        "step()": lambda: pipe.step(TOKENS, target=TARGET),
    }


PAIRS = [
    ("save()", "step()"),
    ("load()", "step()"),
    ("save()", "load()"),
    ("state_dict(gathered=True)", "save()"),
    ("clip_grad_norm_", "save()"),
    ("trace", "step()"),
    ("eval()", "load()"),
    ("a GradScaler's step", "step()"),
]


def apart(rank: int, group: Any, runs: str, shape: Any, way: str | None) -> list[str]:
    """The last rank makes another call than the others, one pair after the other."""
    pipe = pipeline(2, mesh=mesh_of(group, shape), data_parallel=way)
    training = Training(pipe)
    training.run(1)
    training.save(runs)
    told: list[str] = []
    last = rank == (1 if shape is None else 3)
    for pair in PAIRS:
        with pytest.raises(tl.TaktlineError) as caught:
            calls(training, runs)[pair[last]]()
        told.append(str(caught.value))
        assert pipe.grad_norm() >= 0, "the next call works"
    training.run(1)
    return told


@pytest.mark.parametrize(("shape", "way"), [(None, None), ((2, 2), "fsdp")], ids=["plain", "fsdp"])
def test_different_calls(workers: Workers, tmp_path: Path, shape: Any, way: str | None) -> None:
    ranks = 2 if shape is None else 4
    for told in workers.run(apart, str(tmp_path), shape, way, ranks=ranks):
        for (one, other), text in zip(PAIRS, told, strict=True):
            if "trace" in (one, other) and "step()" in (one, other):
                assert "trace" in text
                continue
            known = {"clip_grad_norm_": "grad_norm()", "trace": "step()"}
            names = [known.get(name, name) for name in (one, other)]
            assert "disagree on the call" in text
            # A GradScaler does not know the schedule, which tells replicas of a call.
            told_of = names[: 1 if "Scaler" in one and shape else 2]
            assert all(name in text for name in told_of)
            if shape is None:
                assert text == (
                    f"the ranks disagree on the call: {names[0]} on rank 0; {names[1]} on rank 1; "
                    "make the same calls in the same order on every rank"
                )


def alone(rank: int, group: Any, runs: str) -> None:
    """The first rank calls, and the other one has nothing more to do."""
    # No step before: on a busy machine, the first one may take longer than a short timeout.
    training = Training(pipeline(2, mesh=mesh_of(group, None), timeout=4))
    if rank == 0:
        training.save(runs)


def test_a_call_of_one_rank_only(workers: Workers, tmp_path: Path) -> None:
    error, nothing = workers.outcomes(alone, str(tmp_path))
    assert nothing is None
    assert isinstance(error, StallError)
    assert str(error).startswith("rank 1 has not answered in time")
    assert not list(tmp_path.glob("*step*"))
