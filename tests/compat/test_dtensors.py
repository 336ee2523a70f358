"""DTensors under torch's names: in batches, at boundaries, and in what is merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from taktline.compat.torch_pipelining import microbatch, schedules
from taktline.compat.torch_pipelining.stage import PipelineStage
from tests.compat.peer import SINCE_2_13
from tests.compat.programs import CPU, WIDTH, make_batch, make_layers
from tests.compat.test_custom_schedules import order
from tests.runtime.parallel import mesh_of
from tests.workers import Workers

pytestmark = SINCE_2_13


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of two ranks, of which this is the first."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, values: Tensor, *placements: Any) -> DTensor:
    return DTensor.from_local(values, mesh, placements or (Shard(0),), run_check=False)


def test_targets_are_cut_as_they_are_placed(mesh: DeviceMesh) -> None:
    target = sharded(mesh, torch.arange(5))
    parts = microbatch._split_tensor(target, schedules._TARGET_CHUNK_SPEC, 2)
    assert [part.placements for part in parts] == [(Shard(0),)] * 2
    assert [part.to_local().tolist() for part in parts] == [[0, 1, 2], [3, 4]]


def test_a_batch_that_requires_a_gradient_is_evaluated(mesh: DeviceMesh) -> None:
    group = dist.new_group([0])
    module = nn.Linear(WIDTH, WIDTH)
    replicated = {name: distribute_tensor(p, mesh) for name, p in module.named_parameters()}
    for name, value in replicated.items():
        setattr(module, name, nn.Parameter(value))
    stage = PipelineStage(module, 0, 1, CPU, group=group)
    schedule = schedules.ScheduleGPipe(stage, 2, loss_fn=lambda y, t: (y - t).sum())
    x = sharded(mesh, torch.ones(4, WIDTH)).requires_grad_()
    output = schedule.eval(x)
    assert output.placements == (Shard(0),)
    assert output.shape == (8, WIDTH)


class Down(schedules._PipelineScheduleRuntime):
    """An order of one's own, with one stage per rank."""

    def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any) -> None:
        super().__init__(stages, n_microbatches, loss_fn=loss_fn)
        self._prepare_schedule_with_comms(order("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))


def loss(output: Any, target: Any) -> Any:
    return ((output - target) ** 2).mean()


def _boundaries(rank: int, group: dist.ProcessGroup, declared: bool) -> None:
    mesh = mesh_of(group, ((2, 2), ("pp", "tp")))
    here, tp, count = mesh["pp"].get_local_rank(), mesh["tp"], 2
    layers, plain = make_layers(count), make_layers(count)
    # The first gives shards, whose gradients come back as parts of a sum.
    styles = [
        {"0": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)},
        {"0": RowwiseParallel(output_layouts=Replicate(), use_local_output=False)},
    ]
    for layer, style in ((layers[here], styles[here]), *zip(plain, styles, strict=True)):
        for name in ("1", "2"):
            setattr(layer, name, nn.Identity())
        parallelize_module(layer, tp, style)
    x, target = (distribute_tensor(value, tp, [Replicate()]) for value in make_batch())
    parts = zip(x.chunk(2), target.chunk(2), strict=True)
    for part, goal in parts:
        (loss(plain[1](plain[0](part)), goal) / 2).backward()
    options: dict[str, Any] = {"get_mesh": lambda names, layout: tp} if declared else {}
    stage = PipelineStage(layers[here], here, count, CPU, group=mesh["pp"].get_group(), **options)
    seen: list[Any] = []
    stage.submod.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    schedule = Down([stage], 2, loss)
    output = schedule.step(*([x] if here == 0 else []), **({} if here == 0 else {"target": target}))
    assert all(isinstance(value, DTensor) for value in seen)
    placements = [(Replicate(),)] if here == 0 else [(Shard(-1),), (Shard(1),)]
    assert all(value.placements in placements for value in seen)
    if here == 1:
        torch.testing.assert_close(output.full_tensor(), plain[1](plain[0](x)).full_tensor())
    expected = dict(plain[here].named_parameters())
    for name, parameter in layers[here].named_parameters():
        found, wanted = parameter.grad, expected[name].grad
        assert isinstance(found, DTensor)
        assert isinstance(wanted, DTensor)
        torch.testing.assert_close(found.full_tensor(), wanted.full_tensor())
        if declared:
            assert found.placements == wanted.placements, name


@pytest.mark.processes
@pytest.mark.parametrize("declared", [False, True])
def test_boundaries_of_a_derived_schedule(workers: Workers, declared: bool) -> None:
    workers.run(_boundaries, declared, ranks=4)
