"""Stages of DTensors under every schedule: the same as with torch's package, in all they show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.compat.peer import SINCE_2_12, SINCE_2_13, module
from tests.compat.programs import CPU, WIDTH, make_batch, make_layers
from tests.runtime.parallel import mesh_of
from tests.workers import Workers

pytestmark = [SINCE_2_12, pytest.mark.processes]

COUNT = 4
SCHEDULES = {
    "GPipe": (1, "loop"),
    "1F1B": (1, "loop"),
    "Interleaved1F1B": (2, "loop"),
    "LoopedBFS": (2, "loop"),
    "InterleavedZeroBubble": (2, "loop"),
    "ZBVZeroBubble": (2, "v"),
    "DualPipeV": (2, "v"),
}


def loss(output: Any, target: Any) -> Any:
    output = output[0] if isinstance(output, tuple) else output
    return ((output - target) ** 2).mean()


class Noted(nn.Module):
    """Hands on a tensor that is no DTensor, and has no gradient, beside the other."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: DTensor, note: Any = None) -> Any:
        return self.inner(x), torch.ones(x.shape[0], 3) if note is None else note + 1


def look(value: Any) -> Any:
    """What of a tensor both packages must have alike."""
    if isinstance(value, tuple):
        return [look(part) for part in value]
    if not isinstance(value, DTensor):
        return None if value is None else value.tolist()
    return value.placements, [round(x, 5) for x in value.full_tensor().flatten().tolist()]


class Side:
    """One package's stages and schedule on a rank of two by two."""

    def __init__(self, package: Any, group: dist.ProcessGroup, name: str) -> None:
        mesh = mesh_of(group, ((2, 2), ("pp", "tp")))
        self.tp, self.package, self.name = mesh["tp"], package, name
        self.per_rank, style = SCHEDULES[name]
        self.count, self.group = 2 * self.per_rank, mesh["pp"].get_group()
        placed = package._utils.generate_rank_to_stage_mapping(2, self.count, style)
        self.mine = placed[mesh["pp"].get_local_rank()]
        layers = make_layers(self.count)
        self.modules: dict[int, nn.Module] = {index: layers[index] for index in self.mine}

    def parallelize(self, at_boundaries: Any) -> None:
        for index, layer in self.modules.items():
            first, last = index == 0, index == self.count - 1
            given = Replicate() if first else at_boundaries
            returned = Replicate() if last else at_boundaries
            styles = {
                "0": ColwiseParallel(input_layouts=given, use_local_output=False),
                "2": RowwiseParallel(output_layouts=returned, use_local_output=False),
            }
            parallelize_module(layer, self.tp, styles)

    def make(self, **options: Any) -> None:
        stage_class, schedules = self.package.stage.PipelineStage, self.package.schedules
        self.stages = [
            stage_class(m, i, self.count, CPU, group=self.group, **options)
            for i, m in self.modules.items()
        ]
        cls = schedules.get_schedule_class(self.name)
        single = issubclass(cls, schedules.PipelineScheduleSingle)
        self.schedule = cls(self.stages[0] if single else self.stages, COUNT, loss_fn=loss)

    def run(self, call: str = "step") -> Any:
        x, target = (distribute_tensor(value, self.tp, [Replicate()]) for value in make_batch())
        losses: list[Any] = []
        last = {"target": target, "losses": losses} if self.count - 1 in self.mine else {}
        output = getattr(self.schedule, call)(*([x] if 0 in self.mine else []), **last)
        gradients = {
            f"{index}.{name}": look(parameter.grad)
            for index, m in self.modules.items()
            for name, parameter in m.named_parameters()
        }
        return look(output), [look(value.detach()) for value in losses], gradients

    def shown(self) -> Any:
        """What its stages know of their boundaries."""
        sides = ("inputs", "outputs", "input_grads", "output_grads")
        return [
            (
                [repr(getattr(stage._stage_meta, side)) for side in sides],
                (stage._inference_mode.name, len(stage._mesh_cache), stage.act_send_info),
            )
            for stage in self.stages
        ]


def _compare(rank: int, group: dist.ProcessGroup, name: str, prepare: Callable[..., Any]) -> None:
    results: list[list[Any]] = []
    for package in module(""):
        side = Side(package, group, name)
        prepare(side)
        # In torch, eval() on the placement of a V can wait for ever.
        evaluated = ["eval"] if SCHEDULES[name][1] == "loop" else []
        results.append([])
        for call in ("step", *evaluated, "step"):
            for layer in side.modules.values():
                layer.zero_grad()
            results[-1] += [side.run(call), side.shown()]
    theirs, ours = results
    for expected, found in zip(theirs, ours, strict=True):
        assert found == expected


def replicated(side: Side) -> None:
    side.parallelize(Replicate())
    side.make(get_mesh=lambda names, layout: side.tp)


def sharded_rows(side: Side) -> None:
    side.parallelize(Shard(0))
    side.make(get_mesh=lambda names, layout: side.tp)


def sharded_columns(side: Side) -> None:
    side.parallelize(Shard(-1))
    side.make(get_mesh=lambda names, layout: side.tp)


def beside_a_plain_tensor(side: Side) -> None:
    side.parallelize(Replicate())
    side.modules = {index: Noted(inner) for index, inner in side.modules.items()}
    side.make(get_mesh=lambda names, layout: side.tp)


def told_in_advance(side: Side) -> None:
    """With all that a stage must know, nothing is found out."""
    side.parallelize(Shard(0))
    first = side.mine == [0]
    rows = make_batch()[0].shape[0] // COUNT

    def example(placement: Any, *, wants: bool = False) -> torch.Tensor:
        value = DTensor.from_local(
            torch.ones(rows // (2 if placement == Shard(0) else 1), WIDTH), side.tp, [placement]
        )
        return value.detach().requires_grad_(wants)

    side.make(
        input_args=example(Replicate() if first else Shard(0), wants=not first),
        output_args=example(Shard(0) if first else Replicate(), wants=True),
        input_grads=(None if first else example(Shard(0)),),
        output_grads=(example(Shard(0) if first else Replicate()),),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SCHEDULES)
def test_replicated_boundaries(workers: Workers, name: str) -> None:
    workers.run(_compare, name, replicated, ranks=4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "prepare",
    [
        *(sharded_rows, sharded_columns),
        # Before, torch wants a gradient of every tensor that is received.
        pytest.param(beside_a_plain_tensor, marks=SINCE_2_13),
    ],
)
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_boundaries_of_other_kinds(workers: Workers, name: str, prepare: Any) -> None:
    workers.run(_compare, name, prepare, ranks=4)


def test_stages_with_all_metadata_passed_in_advance(workers: Workers) -> None:
    workers.run(_compare, "GPipe", told_in_advance, ranks=4)


def _without_a_mesh(rank: int, group: dist.ProcessGroup) -> None:
    package = module("").ours
    side = Side(package, group, "GPipe")
    side.parallelize(Replicate())
    side.make(get_mesh=lambda names, layout: None)
    with pytest.raises(package._utils.PipeliningMetadataError, match="callback returned None for"):
        side.run()


def test_every_rank_hears_of_a_mesh_that_is_not_found(workers: Workers) -> None:
    workers.run(_without_a_mesh, ranks=4)
