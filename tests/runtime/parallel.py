"""Training runs on a mesh of pipelines: stages in every wrapper, compared with the plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import taktline as tl
from taktline.plan import Plan
from tests import models

Wrap = Callable[[nn.Sequential, DeviceMesh], Any]
Shape = tuple[tuple[int, ...], tuple[str, ...]]
Texts = list[list[str]]
"""A plan, to be sent to workers."""

SQUARE: Shape = ((2, 2), ("pp", "dp"))

_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[Shape, DeviceMesh]] = WeakKeyDictionary()


def mesh_of(group: dist.ProcessGroup, shape: Shape = SQUARE, device: str = "cpu") -> DeviceMesh:
    """The four workers as a mesh; made once, since each makes new groups."""
    if group not in _meshes:
        # What was found out on an equal mesh of groups that have ended names those.
        _clear_sharding_prop_cache()
    known = _meshes.setdefault(group, {})
    if shape not in known:
        known[shape] = init_device_mesh(device, shape[0], mesh_dim_names=shape[1])
    return known[shape]


def in_ddp(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def in_fsdp(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    return fully_shard(module, mesh=mesh)


def in_nested_fsdp(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    for layer in module:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def in_parts(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    """No wrapper around all: every layer is a root of its own."""
    for layer in module:
        fully_shard(layer, mesh=mesh)
    return module


def in_replicate(module: nn.Sequential, mesh: DeviceMesh) -> Any:
    return replicate(module, mesh=mesh)


WRAPPERS: Mapping[str, Wrap] = {
    "ddp": in_ddp,
    "fsdp": in_fsdp,
    "nested_fsdp": in_nested_fsdp,
    "replicate": in_replicate,
}


@dataclass(frozen=True)
class Case:
    """A model in a wrapper, a schedule, and what is done with batches of 16 samples in all."""

    schedule: str
    wrap: Wrap
    calls: tuple[str, ...] = ("step",)
    """Of step, eval, and update: what an optimizer does."""
    model: str = "gpt"
    microbatches: int = 4
    dtype: torch.dtype = torch.float64
    ranks: int = 2
    mesh: Shape = SQUARE
    """Its first dimension is that of the pipeline; a wrapper gets the others."""
    data: tuple[str, ...] = ("dp",)
    """The dimensions whose ranks work on different samples."""
    device: str = "cpu"

    @property
    def stages(self) -> int:
        return self.ranks * (1 if self.schedule in ("ScheduleGPipe", "Schedule1F1B") else 2)

    @property
    def plan(self) -> Plan:
        return tl.build(
            self.schedule,
            ranks=self.ranks,
            microbatches=self.microbatches,
            stages_per_rank=self.stages // self.ranks,
        )


def stage_modules(case: Case) -> list[nn.Sequential]:
    layers = models.make_layers(case.model, 2 * case.stages)
    return [module.to(case.device, case.dtype) for module in models.cut(layers, case.stages)]


def batch_of(case: Case, number: int) -> tuple[Tensor, Tensor]:
    x, target = models.make_batch(case.model, 16, seed=number, dtype=case.dtype)
    return x.to(case.device), target.to(case.device)


def update(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        if parameter.grad is not None:
            parameter.sub_(parameter.grad, alpha=0.5)
    parameter.grad = None


class Log(TorchDispatchMode):
    """Notes the collectives that happen inside, beside what else is noted."""

    NAMES: Mapping[str, str] = {
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "allreduce_": "all_reduce",
        "broadcast_": "broadcast",
    }

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname in self.NAMES:
            self.events.append(self.NAMES[func._opname])
        return func(*args, **(kwargs or {}))

    def counts(self) -> dict[str, int]:
        return {name: self.events.count(name) for name in sorted(set(self.events))}


class Telling(tl.PipelineStage):
    """A stage that notes what it computes."""

    log: Log

    def keep(self, microbatch: int, inputs: Any, roots: Any) -> None:
        self.log.events.append(f"{self.stage_index}F{microbatch}")
        super().keep(microbatch, inputs, roots)

    def backward(self, microbatch: int, gradients: Any) -> Any:
        self.log.events.append(f"{self.stage_index}B{microbatch}")
        return super().backward(microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: Any) -> Any:
        self.log.events.append(f"{self.stage_index}I{microbatch}")
        return super().backward_input(microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        if microbatch in self._weights_due:  # else all was done in I
            self.log.events.append(f"{self.stage_index}W{microbatch}")
        super().backward_weight(microbatch)


class TellingNames:
    """The names of Taktline, with stages that tell."""

    PipelineStage = Telling

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)


class Rank:
    """One rank of a case: its stages, its schedule, and its part of the batches."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        case: Case,
        plan: Texts | None = None,
        names: Any = tl,
        **options: Any,
    ) -> None:
        mesh = mesh_of(group, case.mesh, case.device)
        first, *others = case.mesh[1]
        self.case = case
        self.parts, self.replica = 1, 0
        for name in case.data:
            self.parts *= mesh[name].size()
            self.replica = self.replica * mesh[name].size() + mesh[name].get_local_rank()
        pipeline, modules = mesh[first], stage_modules(case)
        mine = case.plan.placement.stages_of(pipeline.get_local_rank())
        inner = mesh[others[0]] if len(others) == 1 else mesh[tuple(others)]
        self.modules = {s: case.wrap(modules[s], inner) for s in mine}
        self.stages = [
            names.PipelineStage(
                module, s, case.stages, torch.device(case.device), group=pipeline.get_group()
            )
            for s, module in self.modules.items()
        ]
        loss_fn = models.loss_fn(case.model)
        if plan is not None:
            self.schedule = tl.ScheduleFromPlan(
                self.stages, Plan.from_actions(plan), loss_fn, **options
            )
        else:
            stages = self.stages if case.stages > case.ranks else self.stages[0]
            make = getattr(names, case.schedule)
            self.schedule = make(stages, case.microbatches, loss_fn=loss_fn, **options)

    def call(self, name: str, number: int = 0) -> list[Tensor]:
        """A call with this replica's part of a batch; returns the losses."""
        if name == "update":
            for module in self.modules.values():
                for parameter in module.parameters():
                    update(parameter)
            return []
        x, target = (t.chunk(self.parts)[self.replica] for t in batch_of(self.case, number))
        losses: list[Tensor] = []
        getattr(self.schedule, name)(x, target=target, losses=losses, return_outputs=False)
        return losses

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradients of this rank's stages, under the names of the plain modules."""
        return {
            name: whole(parameter.grad)
            for s, module in self.modules.items()
            for name, parameter in named(s, module)
            if parameter.grad is not None
        }


HIDDEN = ("module", "_orig_mod", "_checkpoint_wrapped_module")
"""What wrappers add to names."""


def named(stage: int, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters():
        parts = [part for part in name.split(".") if part not in HIDDEN]
        name = ".".join(parts)
        yield f"{stage}.{name}", parameter


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


Outcome = tuple[dict[str, Tensor], list[list[Tensor]]]


def run_case(rank: int, group: dist.ProcessGroup, case: Case, plan: Texts | None = None) -> Outcome:
    """The gradients after all calls, and the losses of each."""
    mine = Rank(group, case, plan)
    losses = [mine.call(name, number) for number, name in enumerate(case.calls)]
    return mine.gradients(), losses


def run_logged(
    rank: int, group: dist.ProcessGroup, case: Case, plan: Texts | None = None
) -> tuple[list[str], dict[str, Tensor]]:
    """All that happens in the calls, in order, and the gradients."""
    mine = Rank(group, case, plan, TellingNames())
    with Log() as Telling.log:
        for number, name in enumerate(case.calls):
            mine.call(name, number)
    return Telling.log.events, mine.gradients()


def run_plain(case: Case) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The same on the whole model with the whole batch; the loss of each call."""
    # Neither the schedule nor the wrapper matters; the number of stages is that of layers, too.
    return _run_plain(
        Case("ScheduleGPipe", in_fsdp, case.calls, case.model, 1, case.dtype, case.stages)
    )


@cache
def _run_plain(case: Case) -> tuple[dict[str, Tensor], list[Tensor]]:
    modules, losses = stage_modules(case), []
    for number, name in enumerate(case.calls):
        if name == "update":
            for module in modules:
                for parameter in module.parameters():
                    update(parameter)
            continue
        x, target = batch_of(case, number)
        with torch.set_grad_enabled(name == "step"):
            for module in modules:
                x = module(x)
            loss = models.loss_fn(case.model)(x, target)
        if name == "step":
            loss.backward()
        losses.append(loss.detach())
    gradients = {
        name: parameter.grad
        for s, module in enumerate(modules)
        for name, parameter in named(s, module)
        if parameter.grad is not None
    }
    return gradients, losses


def assert_like_plain(results: list[Outcome], case: Case, *, times: float = 1.0) -> None:
    """Every replica has the gradients, and all together the losses, of the plain model."""
    gradients, losses = run_plain(case)
    assert_gradients([found for found, _ in results], gradients, case, times=times)
    calls = [number for number, name in enumerate(case.calls) if name != "update"]
    for number, loss in zip(calls, losses, strict=True):
        told = [loss for _, losses in results for loss in losses[number]]
        torch.testing.assert_close(torch.stack(told).mean(), loss, rtol=1e-9, atol=1e-12)


def assert_gradients(
    found: list[dict[str, Tensor]],
    expected: Mapping[str, Tensor],
    case: Case,
    *,
    times: float = 1.0,
) -> None:
    size = len(found) // case.ranks
    for replica in range(size):
        mine: dict[str, Tensor] = {}
        for rank in range(case.ranks):
            mine |= found[rank * size + replica]
        assert mine.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(
                mine[name],
                times * gradient,
                rtol=1e-9,
                atol=1e-12,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def texts(plan: Plan) -> Texts:
    return [[str(action) for action in plan[rank]] for rank in range(plan.ranks)]


def collectives_of(plan: Plan, rank: int, **kinds: str) -> list[str]:
    """What a plan says that a log shows of one rank, its collectives by the kind of action."""
    found: list[str] = []
    rows = plan.rows_of(rank)
    for action in map(rows.leaf, range(len(rows))):
        if action.kind.is_compute:
            found.append(str(action))
        elif (name := kinds.get(action.kind.name)) is not None:
            found.append(name)
    return found
