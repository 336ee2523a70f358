"""Training runs on a mesh of pipelines: stages in every wrapper, compared with the plain model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as replicate_with_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import taktline as tl
from taktline.plan import Plan
from tests import models
from tests.runtime.cases import SCHEDULES

Wrap = Callable[[nn.Sequential, DeviceMesh], nn.Module]

_meshes: WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = WeakKeyDictionary()


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    """The four workers as 2 × 2; made once, since each makes new groups."""
    if group not in _meshes:
        _meshes[group] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return _meshes[group]


def in_ddp(module: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def in_fsdp(module: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(module, mesh=mesh)


def in_nested_fsdp(module: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for layer in module:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def in_parts(module: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """No wrapper around all: every layer is a root of its own."""
    for layer in module:
        fully_shard(layer, mesh=mesh)
    return module


def in_replicate(module: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return replicate(module, mesh=mesh)


def in_replicate_with_ddp(module: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return replicate_with_ddp(module, process_group=mesh.get_group())


WRAPPERS: Mapping[str, Wrap] = {
    "ddp": in_ddp,
    "fsdp": in_fsdp,
    "nested_fsdp": in_nested_fsdp,
    "replicate": in_replicate,
}


@dataclass(frozen=True)
class Case:
    """A model in a wrapper, a schedule, and what is done: steps and evals, of 8 samples each."""

    schedule: str
    wrap: Wrap
    calls: tuple[str, ...] = ("step",)
    model: str = "gpt"
    microbatches: int = 4
    dtype: torch.dtype = torch.float64

    @property
    def stages(self) -> int:
        return 2 * (
            1 if 1 in SCHEDULES[self.schedule] and len(SCHEDULES[self.schedule]) == 1 else 2
        )

    @property
    def plan(self) -> Plan:
        return tl.build(
            self.schedule, ranks=2, microbatches=self.microbatches, stages_per_rank=self.stages // 2
        )


def stage_modules(case: Case) -> list[nn.Sequential]:
    layers = models.make_layers(case.model, 2 * case.stages)
    return [module.to(case.dtype) for module in models.cut(layers, case.stages)]


def batch_of(case: Case, number: int) -> tuple[Tensor, Tensor]:
    return models.make_batch(case.model, 16, seed=number, dtype=case.dtype)


class Rank:
    """One rank of a case: its stages, its schedule, and its part of the batches."""

    def __init__(
        self, group: dist.ProcessGroup, case: Case, plan: Plan | None = None, **options: Any
    ) -> None:
        mesh = mesh_of(group)
        self.case = case
        self.replica = mesh["dp"].get_local_rank()
        modules = stage_modules(case)
        mine = case.plan.placement.stages_of(mesh["pp"].get_local_rank())
        self.modules = {s: case.wrap(modules[s], mesh["dp"]) for s in mine}
        self.stages = [
            tl.PipelineStage(
                module, s, case.stages, torch.device("cpu"), group=mesh["pp"].get_group()
            )
            for s, module in self.modules.items()
        ]
        self.schedule = tl.ScheduleFromPlan(
            self.stages, plan or case.plan, models.loss_fn(case.model), **options
        )
        if plan is None:
            single = case.stages == 2
            self.schedule = getattr(tl, case.schedule)(
                self.stages[0] if single else self.stages,
                case.microbatches,
                loss_fn=models.loss_fn(case.model),
                **options,
            )

    def call(self, name: str, number: int) -> list[Tensor]:
        """One step or eval with this replica's half of a batch; gives the losses."""
        x, target = (t.chunk(2)[self.replica] for t in batch_of(self.case, number))
        losses: list[Tensor] = []
        getattr(self.schedule, name)(x, target=target, losses=losses, return_outputs=False)
        return losses

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradients of this rank's stages, under the names of the plain modules."""
        found = {}
        for s, module in self.modules.items():
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    name = name.removeprefix("module.").replace("_orig_mod.", "")
                    found[f"{s}.{name}"] = whole(parameter.grad)
        return found


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def run_case(rank: int, group: dist.ProcessGroup, case: Case) -> tuple[Any, list[list[Tensor]]]:
    """The gradients after all calls, and the losses of each."""
    mine = Rank(group, case)
    losses = [mine.call(name, number) for number, name in enumerate(case.calls)]
    return mine.gradients(), losses


def run_plain(case: Case) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The same on the whole model with the whole batch; the loss of each call."""
    modules, losses = stage_modules(case), []
    for number, name in enumerate(case.calls):
        x, target = batch_of(case, number)
        with torch.set_grad_enabled(name == "step"):
            for module in modules:
                x = module(x)
            loss = models.loss_fn(case.model)(x, target)
        if name == "step":
            loss.backward()
        losses.append(loss.detach())
    gradients = {
        f"{s}.{name}": parameter.grad
        for s, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return gradients, losses


def assert_like_plain(
    results: list[tuple[Any, list[list[Tensor]]]], case: Case, **close: Any
) -> None:
    """Every replica has the gradients, and both together the losses, of the plain model."""
    gradients, losses = run_plain(case)
    for replica in (0, 1):
        found = results[replica][0] | results[2 + replica][0]
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                found[name], gradient, **close, msg=lambda m, n=name: f"{n}: {m}"
            )
    for number, loss in enumerate(losses):
        told = [loss for _, losses in results for loss in losses[number]]
        torch.testing.assert_close(torch.stack(told).mean(), loss, **close)
