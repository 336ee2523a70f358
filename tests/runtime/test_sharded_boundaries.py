"""DTensors at boundaries: tensor parallelism in stages, on a mesh of pipeline × tensor ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import taktline as tl
from tests.runtime.scenarios import CPU, SCHEDULES, plan_for
from tests.workers import Workers

DIM, LENGTH = 8, 6
needs_2_13 = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch places some DTensor gradients differently before 2.13"
)


class Block(nn.Module):
    """A norm, an MLP and a residual, as plain as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def blocks(count: int) -> list[Any]:
    torch.manual_seed(7)
    return [Block() for _ in range(count)]


class Sequence(nn.Module):
    """A block whose input and output are DTensors in shards along the sequence."""

    def __init__(self, block: Any, mesh: DeviceMesh, stage: int, count: int) -> None:
        super().__init__()
        self.mesh, self.first, self.last = mesh, stage == 0, stage == count - 1
        self.block: Any = parallelize_module(
            block,
            mesh,
            {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            },
        )

    def forward(self, x: Any) -> Tensor:
        if self.first:
            x = distribute_tensor(x, self.mesh, [Shard(1)])
        assert isinstance(x, DTensor)
        assert x.placements == (Shard(1),)
        x = self.block(x)
        return x.full_tensor() if self.last else x


class Mixed(nn.Module):
    """Linear layers in turn by column and by row: shards, then parts of a sum, then replicas.

    What crosses is a dict with several kinds of them, a plain tensor among it.
    """

    def __init__(self, block: Any, mesh: DeviceMesh, stage: int, count: int) -> None:
        super().__init__()
        self.mesh, self.stage, self.last = mesh, stage, stage == count - 1
        self.block: Any = block
        for linear, dim in ((block.up, 0), (block.down, 1)):
            weight = distribute_tensor(linear.weight.detach(), mesh, [Shard(dim)])
            linear.weight = nn.Parameter(weight)
            placement = Shard(0) if dim == 0 else Replicate()
            linear.bias = nn.Parameter(distribute_tensor(linear.bias.detach(), mesh, [placement]))
        for name, parameter in list(block.norm.named_parameters()):
            replica = distribute_tensor(parameter.detach(), mesh, [Replicate()])
            setattr(block.norm, name, nn.Parameter(replica))

    def forward(self, given: Any) -> Any:
        if self.stage == 0:
            x: Any = distribute_tensor(given, self.mesh, [Replicate()])
        else:
            assert given["columns"].placements == (Shard(2),)
            assert given["partial"].placements == (Partial(),)
            x = given["columns"] + given["partial"] + given["whole"]
            x = x.redistribute(placements=[Replicate()]) + distribute_tensor(
                given["plain"], self.mesh, [Replicate()]
            )
        inner = torch.tanh(self.block.up(self.block.norm(x)))
        partial = F.linear(inner, self.block.down.weight)
        if self.last:
            return (x + partial + self.block.down.bias).full_tensor()
        return {
            "columns": x.redistribute(placements=[Shard(2)]),
            "partial": partial,
            "whole": self.block.down.bias + torch.zeros_like(x),
            "plain": given["plain"] if self.stage else given.new_zeros(given.shape),
        }


MODULES = {"sequence": Sequence, "mixed": Mixed}


def train(rank: int, group: dist.ProcessGroup, schedule: str, name: str) -> dict[str, Any]:
    """Gradients of this rank's stages, whole, after three steps: two sizes, two of the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    plan = plan_for(schedule, 2)
    made = blocks(plan.stages)
    mine = plan.placement.stages_of(mesh["pp"].get_local_rank())
    wrapped = {s: MODULES[name](made[s], mesh["tp"], s, plan.stages) for s in mine}
    stages = [
        tl.PipelineStage(wrapped[s], s, plan.stages, CPU, group=mesh["pp"].get_group())
        for s in mine
    ]
    runner = tl.ScheduleFromPlan(stages, plan, F.mse_loss)
    for number, size in enumerate((8, 8, 12)):
        x, target = batch(number, size)
        runner.eval(x)
        runner.step(x, target=target)
    return {
        f"{s}.{n}": p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for s in mine
        for n, p in wrapped[s].block.named_parameters()
    }


def batch(number: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, target = torch.randn(2, size, LENGTH, DIM, generator=generator)
    return x, target


def plain(stages: int) -> dict[str, Tensor | None]:
    model = nn.Sequential(*blocks(stages))
    for number, size in enumerate((8, 8, 12)):
        x, target = batch(number, size)
        for x_m, target_m in zip(x.tensor_split(4), target.tensor_split(4), strict=True):
            (F.mse_loss(model(x_m), target_m) / 4).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.sampled(3)
@needs_2_13
@pytest.mark.processes
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shards_cross_boundaries(workers: Workers, schedule: str, name: str) -> None:
    found = workers.run(train, schedule, name, ranks=4)
    expected = plain(plan_for(schedule, 2).stages)
    for tensor_rank in (0, 1):
        gradients = found[tensor_rank] | found[2 + tensor_rank]
        assert gradients.keys() == expected.keys()
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)


class Plain(nn.Module):
    """Has no parameters on a mesh, so nothing tells where a DTensor lies."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is not None:
            x = self.linear(x)
            return DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)
        assert isinstance(x, DTensor)
        return self.linear(x.to_local())


def with_get_mesh(rank: int, group: dist.ProcessGroup, answer: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    place = mesh["pp"].get_local_rank()
    asked: list[Any] = []

    def get_mesh(names: tuple[str, ...], layout: Any) -> DeviceMesh | None:
        asked.append((names, layout))
        return {"right": mesh["tp"], "none": None, "wrong": mesh}[answer]

    torch.manual_seed(rank % 2)
    module = Plain(mesh["tp"] if place == 0 else None)
    stage = tl.PipelineStage(
        module,
        place,
        2,
        CPU,
        group=mesh["pp"].get_group(),
        get_mesh=None if answer == "absent" else get_mesh,
    )
    schedule = tl.Schedule1F1B(stage, 2, F.mse_loss)
    try:
        for _ in range(2):
            schedule.step(torch.ones(4, DIM), target=torch.ones(4, DIM))
    except tl.StageError as error:
        return str(error)
    return asked


@pytest.mark.processes
def test_get_mesh_is_asked_once_by_the_names_of_dimensions(workers: Workers) -> None:
    # The first stage knows the mesh from what it sends.
    assert workers.run(with_get_mesh, "right", ranks=4) == [[], [], *[[(("tp",), None)]] * 2]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            "absent",
            "a tensor arrives in shards over the mesh tp (2), and no parameter of this stage is on "
            "such a mesh; pass get_mesh=lambda names, layout: mesh to the stage",
        ),
        (
            "none",
            "get_mesh returns None for the mesh tp (2) of a received tensor; it must return a mesh "
            "of that shape with this rank in it",
        ),
        (
            "wrong",
            "get_mesh returns a mesh of [2, 2] for the mesh tp (2) of a received tensor; it must "
            "return a mesh of that shape with this rank in it",
        ),
    ],
)
def test_a_mesh_that_cannot_be_found(workers: Workers, answer: str, text: str) -> None:
    found = workers.run(with_get_mesh, answer, ranks=4)
    assert found == [f"rank 1, stage 1, micro-batch 0 (1F0): SignatureError: {text}"] * 4


def another_placement(rank: int, group: dist.ProcessGroup) -> str:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    first = tl.meta.Signature.of([distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])])
    return first.difference([distribute_tensor(torch.ones(8, 8), mesh, [Shard(1)])])


@pytest.mark.processes
def test_another_placement_is_another_signature(workers: Workers) -> None:
    (text,) = set(workers.run(another_placement, ranks=4))
    assert text == (
        "output 0 is float32[8, 2] (S(1) over tp (4)), not float32[2, 8] (S(0) over tp (4))"
    )


def failing(rank: int, group: dist.ProcessGroup) -> str:
    """A forward that fails on both ranks that compute a stage together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    place = mesh["pp"].get_local_rank()
    module = Sequence(blocks(2)[place], mesh["tp"], place, 2)
    if place == 1:
        module.register_forward_pre_hook(lambda *_: 1 / 0)
    stage = tl.PipelineStage(module, place, 2, CPU, group=mesh["pp"].get_group())
    x, target = batch(0, 8)
    with pytest.raises(tl.StageError) as caught:
        tl.Schedule1F1B(stage, 4, F.mse_loss).step(x, target=target)
    return str(caught.value)


@pytest.mark.processes
def test_a_failure_of_a_stage_that_several_ranks_compute(workers: Workers) -> None:
    (text,) = set(workers.run(failing, ranks=4))
    assert text == "rank 1, stage 1, micro-batch 0 (1F0): ZeroDivisionError: division by zero"
