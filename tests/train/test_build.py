"""How a model is cut: by counted or by measured costs, or why it cannot be."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import PartitionError, TaktlineError
from taktline.train.stage_table import measure
from tests.checkpoint.training import mesh_of
from tests.workers import Workers

WIDTH = 4
X = torch.arange(8.0 * WIDTH).reshape(8, WIDTH) / 32


class Layers(nn.Module):
    """Some layers in a row."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.checked(x)

    def checked(self, x: Tensor) -> Tensor:
        return x


def pipeline(model: Any, **options: Any) -> tl.Pipeline:
    usual: dict[str, Any] = {"example": (X[:2],), "microbatches": 4, "ranks": 2}
    usual["loss_fn"] = nn.functional.mse_loss
    return tl.Pipeline(model, **(usual | options))


class Reading(Layers):
    """Refuses what has no data, or zeros."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.detach().sum().item():
            raise ValueError("the batch is empty")
        return super().forward(x)


class Shared(Layers):
    """Has a module in two places, and a weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH)] * 2)
        first, last = self.get_parameter("layers.0.weight"), self.get_submodule("layers.3")
        last.weight = first

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(super().forward(x))
        return x


def test_a_forward_that_reads_data_has_no_prediction() -> None:
    pipe = pipeline([Reading(), nn.Linear(WIDTH, WIDTH)])
    assert "all stages alike" in str(pipe)
    assert not pipe.boundaries
    assert "from counted operations" in str(pipeline(Reading())), "a cut has recorded what it reads"


@pytest.mark.parametrize("make", [Layers, Shared])
def test_costs_are_counted_and_the_model_stays(make: Callable[[], nn.Module]) -> None:
    model = make()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: tensor.clone() for name, tensor in named.items()}
    drawn = torch.get_rng_state()
    shared = isinstance(model, Shared)
    pipe = pipeline(model, ranks=1 if shared else 2)
    assert "from counted operations" in str(pipe)
    assert shared or pipe.boundaries[0][0].shape == (2, WIDTH)
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor is named[name], name
        assert torch.equal(tensor, values[name]), name


def test_what_a_forward_keeps() -> None:
    stages = [nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 2)]
    needs = measure(stages, (torch.ones(2, 4),))
    # Of the first stage its input and its output; weights are there anyway.
    first, second = (("output", "float32", (2, size), 4 * 2 * size) for size in (8, 2))
    assert [need[:3] for need in needs or ()] == [
        ((2 * 2 * 4 * 8 + 16 * (64 + 32) + 200_000,) * 3, 32 + 64, (first,)),
        ((2 * 2 * 8 * 2 + 16 * 38 + 100_000,) * 3, 64, (second,)),
    ]
    assert [need.sends for need in needs or ()] == [64, 16]


def test_the_table_says_that_it_does_not_know_what_prepare_does() -> None:
    note = "AdamW, messages; all before prepare= and checkpoint="
    assert note not in str(pipeline(Layers()))
    assert str(pipeline(Layers(), prepare=lambda module, stage: module)).endswith(note)


class Failing(Layers):
    """Fails in its own code."""

    def checked(self, x: Tensor) -> Tensor:
        raise KeyError("no such word")


class Odd(Layers):
    """Works by itself, but not without data."""

    def checked(self, x: Tensor) -> Tensor:
        there = [parameter for parameter in self.parameters() if parameter.data_ptr()]
        return x + 0.0 * len(there[5])


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (Failing, {}, "Failing fails on the example, run without data to be cut: KeyError"),
        (Layers, {"example": (torch.ones(2, 5),)}, "Layers fails on the example"),
        (Odd, {}, "data_ptr needs the data of a value"),
        (Layers, {"ranks": 6}, "into 4 stages or fewer: its forward calls 4 layers"),
    ],
)
def test_models_that_cannot_be_cut(make: Any, options: dict[str, Any], text: str) -> None:
    model = make()
    buffers = dict(model.named_buffers())
    with pytest.raises(TaktlineError, match=text) as refused:
        pipeline(model, **options)
    assert model.calls == 0
    assert all(tensor is buffers[name] for name, tensor in model.named_buffers())
    if make is Failing:
        own = traceback.extract_tb(getattr(refused.value.__cause__, "__traceback__", None))
        assert own[-1].name == "checked"


class Slow(nn.Linear):
    """Its time does not show in the operations that are counted without data."""

    loops = 300

    def forward(self, input: Tensor) -> Tensor:
        if not input.is_meta and type(input) is Tensor:
            for _ in range(self.loops):
                torch.exp(torch.ones(100))
        return super().forward(input)


def seven(*, slow: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    last = Slow(4, 4)
    last.loops *= slow
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)), last)


def sizes(pipe: tl.Pipeline) -> list[int]:
    return [len(list(stage.parameters())) for stage in pipe.stages.values()]


def test_cuts_by_times() -> None:
    counted, measured = pipeline(seven()), pipeline(seven(), measure=True)
    assert sizes(measured) == [12, 2]
    assert sizes(counted) != [12, 2]
    assert measured.step(X, target=X) == counted.step(X, target=X)
    with tl.split.deferred():
        empty = seven()
    assert sizes(pipeline(empty, measure=True)) == [12, 2]


def names(rank: int, group: Any, shape: Any, way: str | None) -> list[str]:
    # Elsewhere every layer takes as long: if each rank cut by itself, they would differ.
    model, mesh = seven(slow=rank == 0), mesh_of(group, shape)
    pipe = pipeline(model, mesh=mesh, data_parallel=way, measure=True, ranks=None)
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
    assert {name for each in held for name in each} == set(seven().state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {"cuts": ["3"]},
        {"example": None},
        {"model": [nn.Linear(4, 4), nn.Linear(4, 4)]},
    ],
)
def test_what_cannot_be_measured(options: dict[str, Any]) -> None:
    with pytest.raises(PartitionError, match=r"pass the whole model and example=.*, and no cuts"):
        pipeline(**({"model": seven(), "measure": True} | options))
