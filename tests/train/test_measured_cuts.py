"""Cuts by the times of layers: the same on every rank, and only where there is something to cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import ArgumentError, PartitionError, TaktlineError
from tests.checkpoint.training import mesh_of
from tests.workers import Workers

X = torch.arange(32.0).reshape(8, 4) / 32


class Slow(nn.Linear):
    """Its time does not show in the operations that are counted without data."""

    loops = 300

    def forward(self, input: Tensor) -> Tensor:
        if not input.is_meta and type(input) is Tensor:
            for _ in range(self.loops):
                torch.exp(torch.ones(100))
        return super().forward(input)


def model(*, slow: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    last = Slow(4, 4)
    last.loops *= slow
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)), last)


def pipeline(made: nn.Module | None = None, **options: Any) -> tl.Pipeline:
    settings: Any = {"microbatches": 4, "loss_fn": nn.functional.mse_loss, "example": (X[:2],)}
    return tl.Pipeline(model() if made is None else made, **(settings | options))


def test_cuts_by_times() -> None:
    counted, measured = pipeline(ranks=2), pipeline(ranks=2, measure=True)
    assert [len(list(stage.parameters())) for stage in measured.stages.values()] == [12, 2]
    assert [len(list(stage.parameters())) for stage in counted.stages.values()] != [12, 2]
    assert measured.step(X, target=X) == counted.step(X, target=X)


def test_a_model_without_values() -> None:
    with tl.split.deferred():
        empty = model()
    pipe = pipeline(empty, ranks=2, measure=True)
    assert [len(list(stage.parameters())) for stage in pipe.stages.values()] == [12, 2]


def names(rank: int, group: Any, shape: Any, way: str | None) -> list[str]:
    # Elsewhere every layer takes as long: if each rank cut by itself, they would differ.
    made = model(slow=rank == 0)
    mesh = mesh_of(group, shape)
    pipe = pipeline(made, mesh=mesh, data_parallel=way, measure=True)
    pipe.step(X, target=X)
    return sorted(name for name, _ in pipe.named_parameters())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("shape", "way"), [(None, None), pytest.param((2, 2), "ddp", marks=pytest.mark.matrix)]
)
def test_all_ranks_cut_alike(workers: Workers, shape: Any, way: str | None) -> None:
    ranks = 2 if shape is None else 4
    held = workers.run(names, shape, way, ranks=ranks)
    assert sorted(map(len, held)) == sorted([2, 12] * (ranks // 2))
    assert {name for each in held for name in each} == set(model().state_dict())


class Fails(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if not input.is_meta and type(input) is Tensor:
            raise ValueError("not with data")
        return super().forward(input)


def failure(rank: int, group: Any, case: str) -> str:
    made = model()
    if case == "layer":
        made[3] = Fails(4, 4)
    schedule = "1f2b" if case == "schedule" and rank == 0 else "1f1b"
    with pytest.raises(TaktlineError) as caught:
        pipeline(made, mesh=mesh_of(group, None), schedule=schedule, measure=True)
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "text"), [("layer", "ValueError: not with data"), ("schedule", "called '1f2b'")]
)
def test_all_ranks_hear_why_one_cannot_measure(workers: Workers, case: str, text: str) -> None:
    for told in workers.run(failure, case, ranks=2):
        assert text in told


@pytest.mark.parametrize(
    "options",
    [
        {"cuts": ["3"]},
        {"example": None},
        {"model": [nn.Linear(4, 4), nn.Linear(4, 4)]},
        {"model": {0: nn.Linear(4, 4), 1: nn.Linear(4, 4)}},
    ],
)
def test_what_cannot_be_measured(options: dict[str, Any]) -> None:
    made = options.pop("model", None)
    with pytest.raises(PartitionError, match=r"pass the whole model and example=.*, and no cuts"):
        pipeline(made, ranks=2, measure=True, **options)


def test_a_flag() -> None:
    with pytest.raises(ArgumentError, match="measure must be True or False, not 3"):
        pipeline(ranks=2, measure=3)
