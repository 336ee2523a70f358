"""Builds a pipeline: ranks, plan, stages and schedule."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from taktline.errors import MismatchError
from taktline.plan import Plan
from taktline.runtime import ScheduleFromPlan
from taktline.runtime.watchdog import guarded
from taktline.split import Pipe, materialise
from taktline.split.named.by_names import without_compiler
from taktline.split.named.stage_forward import has_dynamic_shapes
from taktline.stage import PipelineStage, compile_stages
from taktline.stage.names import named_parameters
from taktline.stage.ties import declared
from taktline.train.choose_plan import ScheduleChoice, opened, plan_for
from taktline.train.cutting import Cutting
from taktline.train.model_stages import Model, Parts, stages_in, take_apart
from taktline.train.ranks import Ranks, find_ranks
from taktline.train.stale import note_replaced
from taktline.train.table import Table
from taktline.train.wrap import Prepare, wrapped

__all__ = ["Built", "build"]


@dataclass(frozen=True, slots=True)
class Built:
    """A pipeline, ready to run."""

    ranks: Ranks
    plan: Plan
    parts: Parts
    table: Table
    schedule: ScheduleFromPlan
    """Runs the ranks of this process."""
    cutting: Cutting
    """How it cuts batches."""
    running: Mapping[str, Any]
    """What the schedule was made with."""

    def copied(self, memo: dict[int, Any]) -> Built:
        """The same with copies of all modules, where all ranks are in this process."""
        ranks = Ranks(self.ranks.size, device=self.ranks.device)
        parts = copy.deepcopy(self.parts, memo)
        made = _scheduled(ranks, self.plan, parts, self.table, self.cutting.example, self.running)
        made.schedule.steps = self.schedule.steps
        return made

    def parameters(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """The parameters of this process: stage, name in the model, and itself."""
        for stage in sorted(self.parts.modules):
            for name, parameter in named_parameters(self.parts.modules[stage]).items():
                yield stage, self.parts.name(stage, name), parameter

    def counted(self) -> dict[int, nn.Parameter]:
        """Those that count in a norm, by their places in the model, in its order.

        Of a tied weight, that of the first stage that uses it.
        """
        copies = {
            (stage, self.parts.name(stage, name))
            for module in self.parts.modules.values()
            for tie in declared(module)
            for stage, name in tie.uses[1:]
        }
        places = {name: place for place, name in enumerate(self.parts.names)}
        found = {
            id(parameter): (places[name], parameter)
            for stage, name, parameter in self.parameters()
            if (stage, name) not in copies
        }
        return dict(sorted(found.values(), key=lambda each: each[0]))


def build(
    model: Model,
    example: Any,
    running: Mapping[str, Any],
    *,
    schedule: ScheduleChoice,
    microbatches: int | None,
    ranks: int | None,
    stages_per_rank: int | None,
    cuts: Sequence[str] | None,
    mesh: DeviceMesh | None,
    data_parallel: str | None,
    prepare: Prepare | None,
    compiles: bool,
    device: torch.device | None,
    seed: int | None,
    state_dict: Mapping[str, torch.Tensor] | None,
    timeout: timedelta | None,
) -> Built:
    """Cut the model, keep and move what belongs here, and make the schedule.

    ``running`` goes on to the schedule; for the others see :class:`taktline.Pipeline`.
    """
    if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
        model = without_compiler(model)
    chosen = opened(schedule)
    given = named_parameters(model) if isinstance(model, nn.Module) else {}
    here = find_ranks(
        ranks,
        mesh,
        data_parallel,
        device or _device_of(model),
        default=chosen.ranks if isinstance(chosen, Plan) else 1,
        timeout=timeout,
    )
    plan = plan_for(
        chosen,
        ranks=here.size,
        microbatches=microbatches,
        stages=stages_in(model, cuts),
        stages_per_rank=stages_per_rank,
    )
    if here.in_one_process and isinstance(model, nn.Module) and not isinstance(model, Pipe):
        # As a whole, before it is cut: so it goes on to share all tensors with its stages.
        materialise(model, here.device, state_dict=state_dict)
    options = {**running, "seed": None if seed is None else seed + here.replica}
    with guarded(here.transport, "Pipeline(…)"):
        parts = take_apart(model, plan, example, cuts, here.transport)
        table = Table.of(plan, parts.modules, example, here.transport)
        options["dynamic_shapes"] |= any(map(has_dynamic_shapes, parts.modules.values()))
        parts.keep([stage for rank in here.own for stage in plan.placement.stages_of(rank)])
        _make_ready(parts, here, state_dict, prepare, data_parallel, compiles=compiles)
    built = _scheduled(here, plan, parts, table, example, options)
    here.made.keep_for(built.schedule, *parts.modules.values())
    _require_wrapped(built)
    note_replaced(given, ((name, parameter) for _, name, parameter in built.parameters()))
    with guarded(here.transport, "Pipeline(…)"):
        built.schedule._runner.connect()
    return built


def _make_ready(
    parts: Parts,
    ranks: Ranks,
    state_dict: Mapping[str, torch.Tensor] | None,
    prepare: Prepare | None,
    data_parallel: str | None,
    *,
    compiles: bool,
) -> None:
    """Give the stages of this process their values, and then prepare, compile and wrap them."""
    for module in parts.modules.values():
        materialise(module, ranks.device, state_dict=state_dict)
    for stage, module in parts.modules.items():
        ready = module if prepare is None else _prepared(prepare, module, stage)
        if compiles:
            ready = compile_stages(ready, stage)
        parts.modules[stage] = wrapped(ready, ranks, data_parallel)


def _scheduled(
    ranks: Ranks, plan: Plan, parts: Parts, table: Table, example: Any, running: Mapping[str, Any]
) -> Built:
    """With a schedule for the ranks of this process."""
    stages = [
        PipelineStage(parts.modules[stage], stage, plan.stages, ranks.device, group=ranks.group)
        for rank in ranks.own
        for stage in plan.placement.stages_of(rank)
    ]
    schedule = ScheduleFromPlan(stages, plan, **running)
    if len(ranks.own) > 1:
        schedule._runner.run_all_ranks(ranks.size)
    # Keyword arguments are the model's, so every rank is given the same.
    schedule._compared = ("args", "kwargs", "target")
    cutting = Cutting(example, schedule._cutter)
    return Built(ranks, plan, parts, table, schedule, cutting, running)


def _prepared(prepare: Prepare, module: nn.Module, stage: int) -> nn.Module:
    made = prepare(module, stage)
    if not isinstance(made, nn.Module):
        raise MismatchError(
            f"prepare must return the module to use for stage {stage}, not {made!r}"
        )
    return made


def _require_wrapped(built: Built) -> None:
    """Raise if the replicas of a stage would be trained apart from each other."""
    if built.ranks.replicas == 1:
        return
    for stage in built.schedule._stages:
        trains = any(parameter.requires_grad for parameter in stage.submod.parameters())
        if trains and stage.grad_sync is None:
            dims = ", ".join(map(repr, built.ranks.data_dims))
            raise MismatchError(
                f"the mesh has room for {built.ranks.replicas} replicas of stage "
                f"{stage.stage_index} ({dims}), and nothing averages their gradients; say "
                'data_parallel="ddp" or "fsdp", or wrap it in prepare'
            )


def _device_of(model: Model) -> torch.device | None:
    """Where the model lies by now, unless on the CPU or nowhere."""
    if isinstance(model, nn.Module):
        model = [model]
    modules = model.values() if isinstance(model, Mapping) else model
    for module in modules if isinstance(modules, Iterable) else ():
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            if parameter.device.type not in ("cpu", "meta"):
                return parameter.device
    return None
