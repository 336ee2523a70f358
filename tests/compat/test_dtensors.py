"""DTensors in batches and at boundaries, under every schedule: the same as with torch's package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from tests.compat.peer import SINCE_2_12, SINCE_2_13, module
from tests.compat.programs import CPU, WIDTH, make_batch, make_layers
from tests.compat.test_custom_schedules import order
from tests.runtime.parallel import mesh_of
from tests.workers import Workers

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


@SINCE_2_12
@pytest.mark.processes
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SCHEDULES)
def test_replicated_boundaries(workers: Workers, name: str) -> None:
    workers.run(_compare, name, replicated, ranks=4)


@SINCE_2_12
@pytest.mark.processes
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


@SINCE_2_12
@pytest.mark.processes
def test_stages_with_all_metadata_passed_in_advance(workers: Workers) -> None:
    workers.run(_compare, "GPipe", told_in_advance, ranks=4)


def _without_a_mesh(rank: int, group: dist.ProcessGroup) -> None:
    package = module("").ours
    side = Side(package, group, "GPipe")
    side.parallelize(Replicate())
    side.make(get_mesh=lambda names, layout: None)
    with pytest.raises(package._utils.PipeliningMetadataError, match="callback returned None for"):
        side.run()


@SINCE_2_12
@pytest.mark.processes
def test_every_rank_hears_of_a_mesh_that_is_not_found(workers: Workers) -> None:
    workers.run(_without_a_mesh, ranks=4)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of two ranks, of which this is the first."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, values: Tensor, *placements: Any) -> DTensor:
    return DTensor.from_local(values, mesh, placements or (Shard(0),), run_check=False)


@SINCE_2_13
def test_targets_are_cut_as_they_are_placed(mesh: DeviceMesh) -> None:
    target = sharded(mesh, torch.arange(5))
    parts = microbatch._split_tensor(target, schedules._TARGET_CHUNK_SPEC, 2)
    assert [part.placements for part in parts] == [(Shard(0),)] * 2
    assert [part.to_local().tolist() for part in parts] == [[0, 1, 2], [3, 4]]


@SINCE_2_13
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


def _boundaries(rank: int, group: dist.ProcessGroup) -> None:
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
    stage = PipelineStage(layers[here], here, count, CPU, group=mesh["pp"].get_group())
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


@SINCE_2_13
@pytest.mark.processes
def test_boundaries_that_no_stage_declares(workers: Workers) -> None:
    workers.run(_boundaries, ranks=4)
