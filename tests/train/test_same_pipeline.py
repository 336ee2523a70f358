"""Ranks that would not train one model say so when they build it, all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import taktline as tl
from tests.workers import Workers

pytestmark = pytest.mark.processes


class Net(nn.Module):
    """Four layers; some ranks may have others."""

    def __init__(self, width: int = 8, layers: int = 4, **changes: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.act = changes.get("act", nn.Tanh())
        if changes.get("tied"):
            self.layers[3].weight = self.layers[0].weight
        if changes.get("frozen"):
            self.layers[1].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return x


X = torch.ones(2, 8)
Options = Callable[[int], dict[str, Any]]


def pipeline(group: Any, model: Any, **options: Any) -> tl.Pipeline:
    usual: dict[str, Any] = {"microbatches": 2, "loss_fn": nn.functional.mse_loss}
    mesh = options.pop("mesh", None) or DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    return tl.Pipeline(model, mesh=mesh, **(usual | options))


def told(rank: int, group: Any, what: str) -> str:
    """What a rank raises where the last one has something else."""
    other = rank == group.size() - 1
    model, options = CASES[what][other]
    with pytest.raises((tl.TaktlineError, ZeroDivisionError)) as caught:
        pipeline(group, model(), **({"cuts": ["layers.2"]} | options))
    # All ranks have raised, and the next pipeline works.
    pipe = pipeline(group, Net(), cuts=["layers.2"])
    assert pipe.step(torch.ones(4, 8), target=torch.zeros(4, 8)) > 0
    return str(caught.value)


def deferred(**changes: Any) -> nn.Module:
    with tl.split.deferred():
        return Net(**changes)


def traced(cut: int) -> tl.Pipe:
    points = {f"layers.{cut}": tl.SplitPoint.BEGINNING}
    return tl.pipeline(Net(), (X,), split_spec=points)


EXAMPLE: dict[str, Any] = {"cuts": None, "example": (X,)}
_WIDE = (
    "layers.0.weight is float32[8, 8], trained on rank 0, but float32[10, 10], trained on rank 1"
)
_PLACE = "layers.2.weight is in stage 1 on rank 0, but in stage 0 on rank 1"
_MORE = "rank 0 has no parameter layers.4.weight, which is float32[8, 8], trained on rank 1"
Case = tuple[Callable[[], Any], dict[str, Any]]
CASES: dict[str, tuple[Case, Case, str]] = {
    "width": ((Net, {}), (lambda: Net(10), {}), _WIDE),
    "tied": (
        (Net, {}),
        (lambda: Net(tied=True), {}),
        "rank 0 has no tied weight layers.0.weight, which is layers.0.weight = layers.3.weight",
    ),
    "frozen": (
        (Net, {}),
        (lambda: Net(frozen=True), {}),
        "layers.1.weight is float32[8, 8], trained on rank 0, but float32[8, 8], frozen on",
    ),
    "dropout": (
        (lambda: Net(act=nn.Dropout(0.1)), {}),
        (lambda: Net(act=nn.Dropout(0.2)), {}),
        "is Dropout(p=0.1, inplace=False) on rank 0, but Dropout(p=0.2, inplace=False) on",
    ),
    "on none": (
        (Net, {}),
        (Net, {"cuts": ["layers.3"]}),
        _PLACE,
    ),
    "schedule": (
        (Net, {"schedule": "gpipe"}),
        (Net, {}),
        "option schedule is gpipe on rank 0, but 1f1b on rank 1",
    ),
    "unknown schedule": ((Net, {}), (Net, {"schedule": "1f2b"}), "no schedule is called '1f2b'"),
    "seed": ((Net, {"seed": 1}), (Net, {"seed": 2}), "option seed is 1 on rank 0, but 2 on rank 1"),
    "unknown cut": ((Net, {}), (Net, {"cuts": ["nowhere"]}), "nowhere"),
    "auto": ((Net, EXAMPLE), (lambda: Net(layers=6), EXAMPLE), _MORE),
    "deferred": ((deferred, {}), (lambda: deferred(width=10), {}), _WIDE),
    "traced": ((lambda: traced(2), {"cuts": None}), (lambda: traced(3), {"cuts": None}), _PLACE),
    "dict": (
        (lambda: {0: nn.Linear(8, 8)}, {"cuts": None}),
        (Net, {}),
        "the ranks do not build the same pipeline",
    ),
    "missing stage": (
        (lambda: {0: nn.Linear(8, 8)}, {"cuts": None}),
        (lambda: {0: nn.Linear(8, 8)}, {"cuts": None}),
        "of which [1] run here; pass these, not [0]",
    ),
    "cuts of a dict": (
        (lambda: {0: tl.split.by_names(Net(), ["layers.2"])[0]}, {"cuts": None}),
        (lambda: {1: tl.split.by_names(Net(), ["layers.3"])[1]}, {"cuts": None}),
        _PLACE,
    ),
    "prepare": (
        (Net, {}),
        (Net, {"prepare": lambda module, stage: 1 / 0}),
        "division by zero",
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_all_ranks_say_what_differs(workers: Workers, what: str) -> None:
    for error in workers.run(told, what):
        assert CASES[what][2] in error


def replicas(rank: int, group: Any, way: str) -> str:
    """The second replica has other layers, or an error of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    other = mesh["dp"].get_local_rank() == 1
    models: dict[str, Any] = {
        "width": Net(10 if other else 8),
        "dict": {mesh["pp"].get_local_rank(): nn.Linear(8, 10 if other else 8)},
        "error": Net(),
    }
    cuts = None if way == "dict" else ["nowhere" if way == "error" and other else "layers.2"]
    with pytest.raises(tl.TaktlineError) as caught:
        pipeline(group, models[way], cuts=cuts, mesh=mesh, data_parallel="ddp")
    return str(caught.value)


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("width", "layers.0.weight is float32[8, 8], trained on replica 0, but float32[10, 10]"),
        ("dict", "weight is float32[8, 8], trained on replica 0, but float32[10, 8], trained on"),
        ("error", "nowhere"),
    ],
)
def test_replicas_of_another_model(workers: Workers, way: str, text: str) -> None:
    for error in workers.run(replicas, way, ranks=4):
        assert text in error


def by_stages(rank: int, group: Any, way: str) -> str:
    """Stages and a schedule of one's own."""
    cuts = ["layers.3"] if way == "cuts" and rank else ["layers.2"]
    pieces = tl.split.by_names(Net(6 if way == "width" and rank else 8), cuts)
    stage = pieces.build_stage(rank, torch.device("cpu"), group=group)
    schedule = tl.Schedule1F1B(stage, 2, nn.functional.mse_loss)
    with pytest.raises(tl.MismatchError) as caught:
        schedule.step(torch.ones(4, 8), target=torch.zeros(4, 8))
    return str(caught.value)


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("width", "float32[8, 8], trained on rank 0, but float32[6, 6], trained"),
        ("cuts", _PLACE),
    ],
)
def test_stages_of_different_models(workers: Workers, way: str, text: str) -> None:
    for error in workers.run(by_stages, way):
        assert text in error
