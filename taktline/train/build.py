"""Builds a pipeline: ranks, plan, stages and schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from taktline.checkpoint.model_state import ModelState
from taktline.errors import MismatchError, TaktlineError
from taktline.plan import Plan
from taktline.runtime import ScheduleFromPlan
from taktline.runtime.introduction import BUILDING, Compared, together
from taktline.runtime.watchdog import guarded
from taktline.split import Pipe, materialise
from taktline.split.by_names import without_compiler
from taktline.split.recorded_stage import has_dynamic_shapes
from taktline.split.times import Measure
from taktline.stage import PipelineStage, compile_stages
from taktline.stage.names import declared, named_parameters
from taktline.train.batch_dims import BatchDims
from taktline.train.choose_plan import ScheduleChoice, opened, plan_for
from taktline.train.model_stages import Model, kept, stages_in, state_of, take_apart
from taktline.train.ranks import Ranks, find_ranks
from taktline.train.shared_times import shared_times
from taktline.train.stage_table import StageTable
from taktline.train.wrap import require_wrapped, separate, wrapped

Prepare: TypeAlias = Callable[[nn.Module, int], nn.Module]
"""Returns the module to use for a stage, given its module and number."""


@dataclass(slots=True)
class Built:
    """A pipeline, ready to run."""

    ranks: Ranks
    plan: Plan
    model: ModelState
    """The stages of this process."""
    table: StageTable
    example: Any
    options: Mapping[str, Any]
    """Of the schedule."""
    schedule: ScheduleFromPlan = field(init=False)
    """Runs the ranks of this process."""
    batch_dims: BatchDims = field(init=False)

    def __post_init__(self) -> None:
        stages = [
            PipelineStage(
                module, stage, self.plan.stages, self.ranks.device, group=self.ranks.group
            )
            for stage, module in self.model.modules.items()
        ]
        self.schedule = ScheduleFromPlan(stages, self.plan, **self.options)
        if len(self.ranks.own) > 1:
            self.schedule._runner.run_all_ranks(self.ranks.size)
        # Keyword arguments are the model's, so every rank gets the same ones.
        self.schedule._compared = ("args", "kwargs", "target")
        self.batch_dims = BatchDims(self.example, self.schedule._cutter)
        self.schedule._cutter_for = self.batch_dims.fitted

    def parameters(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """The parameters of this process: stage, name in the model, and parameter."""
        for stage in sorted(self.model.modules):
            for name, parameter in named_parameters(self.model.modules[stage]).items():
                yield stage, self.model.name(stage, name), parameter

    def counted(self) -> dict[int, nn.Parameter]:
        """The parameters that count in a norm, by their places in the model, in its order.

        A tied weight counts in the first stage that uses it.
        """
        copies = {
            (stage, self.model.name(stage, name))
            for module in self.model.modules.values()
            for tie in declared(module)
            for stage, name in tie.uses[1:]
        }
        places = {name: place for place, name in enumerate(self.model.names)}
        found = {
            id(parameter): (places[name], parameter)
            for stage, name, parameter in self.parameters()
            if (stage, name) not in copies
        }
        return dict(sorted(found.values(), key=lambda each: each[0]))


def build(
    model: Model,
    example: Any,
    options: Mapping[str, Any],
    *,
    schedule: ScheduleChoice,
    microbatches: int | None,
    ranks: int | None,
    stages_per_rank: int | None,
    cuts: Sequence[str] | None,
    measures: bool,
    mesh: DeviceMesh | None,
    data_parallel: str | None,
    prepare: Prepare | None,
    compiles: bool,
    device: torch.device | None,
    seed: int | None,
    state_dict: Mapping[str, torch.Tensor] | None,
    timeout: timedelta | None,
) -> Built:
    """Cut the model, keep and move the stages of this process, and make the schedule.

    ``options`` are those of the schedule; for the others see :class:`taktline.Pipeline`.
    """
    if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
        model = without_compiler(model)
    given = named_parameters(model) if isinstance(model, nn.Module) else {}
    here = find_ranks(
        ranks,
        mesh,
        data_parallel,
        device or _device_of(model),
        default=_ranks_of(schedule),
        timeout=timeout,
    )

    def cut_by(measure: Measure | None) -> _Cut:
        return together(
            here,
            lambda: _cut(
                model,
                example,
                here,
                state_dict,
                cuts,
                measure,
                schedule=schedule,
                microbatches=microbatches,
                stages_per_rank=stages_per_rank,
            ),
            lambda cut: cut.compared(here, seed, data_parallel=data_parallel),
        )

    with guarded(here.transport, BUILDING):
        cut = cut_by(None)
        if measures:  # now that all ranks have the same model, and can cut it
            cut = cut_by(shared_times(here))
        state = state_of(model, cut.modules, here.transport)
        table = cut.table or StageTable.of(cut.plan, cut.modules, example, here.transport)
        table.prepared = prepare is not None
        own = kept(cut.modules, _own_stages(here, cut.plan))
        ready = together(
            here,
            lambda: _ready(own, here, state_dict, prepare, data_parallel, compiles),
            lambda _: Compared(),
        )
        state.modules = {s: wrapped(module, here, data_parallel) for s, module in ready.items()}
    options = {**options, "seed": None if seed is None else seed + here.replica}
    options["dynamic_shapes"] |= any(map(has_dynamic_shapes, cut.modules.values()))
    built = Built(here, cut.plan, state, table, example, options)
    here.made.keep_for(built.schedule, *state.modules.values())
    _mark_replaced(given, {name: parameter for _, name, parameter in built.parameters()})
    with guarded(here.transport, BUILDING):
        built.schedule._runner.connect()
    return built


def _mark_replaced(before: Mapping[str, torch.Tensor], now: Mapping[str, nn.Parameter]) -> None:
    """Mark parameters that were replaced by others, as FSDP2 does: optimizers of them raise."""
    kept = set(map(id, now.values()))
    for name in before.keys() & now.keys():
        if id(before[name]) not in kept:
            setattr(before[name], _REPLACED, True)
            _watch_optimizers()


_REPLACED = "_taktline_replaced"


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_require_current)


def _require_current(optimizer: Optimizer, *_: object) -> None:
    """Raise before the step of an optimizer that would train nothing."""
    for group in optimizer.param_groups:
        if any(hasattr(parameter, _REPLACED) for parameter in group["params"]):
            raise MismatchError(
                f"this {type(optimizer).__name__} was made before the pipeline, which has replaced "
                "its parameters, as FSDP does, so it would train nothing; make it with "
                "pipe.parameters()"
            )


def _ranks_of(schedule: ScheduleChoice) -> int:
    """How many ranks there are in one process, if nobody says so."""
    try:
        chosen = opened(schedule)
    except TaktlineError:
        return 1  # raised later, on all ranks
    return chosen.ranks if isinstance(chosen, Plan) else 1


@dataclass(frozen=True, slots=True)
class _Cut:
    """A model in stages."""

    plan: Plan
    modules: dict[int, nn.Module]
    """All stages; or those of this process, if it was given only some."""
    table: StageTable | None

    def compared(self, ranks: Ranks, seed: int | None, **options: object) -> Compared:
        """What other ranks must have in common with this one."""
        if all(transport.size == 1 for transport in ranks.everyone):
            return Compared()
        return Compared.of(self.plan, self.modules, seed=seed, **options)


def _cut(
    model: Model,
    example: Any,
    ranks: Ranks,
    state_dict: Mapping[str, torch.Tensor] | None,
    cuts: Sequence[str] | None,
    measure: Measure | None,
    *,
    schedule: ScheduleChoice,
    microbatches: int | None,
    stages_per_rank: int | None,
) -> _Cut:
    """Cut the model; other ranks are asked for the times of its layers alone."""
    plan = plan_for(
        opened(schedule),
        ranks=ranks.size,
        microbatches=microbatches,
        stages=stages_in(model, cuts),
        stages_per_rank=stages_per_rank,
    )
    if ranks.in_one_process and isinstance(model, nn.Module) and not isinstance(model, Pipe):
        # As a whole, before it is cut: then it shares all tensors with its stages.
        materialise(model, ranks.device, state_dict=state_dict)
    modules, table = take_apart(model, plan, example, cuts, measure), None
    own = kept(modules, _own_stages(ranks, plan))
    if isinstance(model, Mapping):
        modules = own
    else:
        table = StageTable.of(plan, modules, example, ranks.transport)
    return _Cut(plan, modules, table)


def _own_stages(ranks: Ranks, plan: Plan) -> list[int]:
    return [stage for rank in ranks.own for stage in plan.placement.stages_of(rank)]


def _ready(
    modules: Mapping[int, nn.Module],
    ranks: Ranks,
    state_dict: Mapping[str, torch.Tensor] | None,
    prepare: Prepare | None,
    data_parallel: str | None,
    compiles: bool,
) -> dict[int, nn.Module]:
    """The stages of this process with their values, prepared and compiled."""
    for module in modules.values():
        materialise(module, ranks.device, state_dict=state_dict)
    if data_parallel == "fsdp":
        separate(modules.values())
    found: dict[int, nn.Module] = {}
    for stage, module in modules.items():
        ready = module if prepare is None else prepare(module, stage)
        if not isinstance(ready, nn.Module):
            raise MismatchError(
                f"prepare must return the module to use for stage {stage}, not {ready!r}"
            )
        found[stage] = compile_stages(ready, stage) if compiles else ready
    if data_parallel is None:
        require_wrapped(found, ranks)
    return found


def _device_of(model: Model) -> torch.device | None:
    """The accelerator that the model lies on, if it does."""
    if isinstance(model, nn.Module):
        model = [model]
    modules = model.values() if isinstance(model, Mapping) else model
    for module in modules if isinstance(modules, Iterable) else ():
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            if parameter.device.type not in ("cpu", "meta"):
                return parameter.device
    return None
