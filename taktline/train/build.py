"""Builds a pipeline: ranks, plan, stages and schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from taktline.checkpoint.model_state import HeldModel, ModelState, Processes
from taktline.checks import conform
from taktline.errors import MismatchError, TaktlineError
from taktline.plan import Plan
from taktline.runtime import ScheduleFromPlan
from taktline.runtime.introduction import BUILDING, Compared, together
from taktline.runtime.watchdog import guarded
from taktline.split import Pipe, materialise
from taktline.split.arguments import Call
from taktline.split.by_names import without_compiler
from taktline.split.costs import Measure, measure_times
from taktline.split.recorded_stage import has_dynamic_shapes
from taktline.split.steps import Cut
from taktline.stage import PipelineStage, compile_stages
from taktline.stage.names import declared, named_parameters
from taktline.train.arguments import ScheduleChoice, opened, plan_for
from taktline.train.batches import BatchDims, loss_in_output
from taktline.train.model_stages import (
    Model,
    kept,
    require_wrapped,
    separate,
    stages_in,
    state_of,
    take_apart,
    wrapped,
)
from taktline.train.ranks import Ranks, find_ranks
from taktline.train.stage_table import StageTable

Prepare: TypeAlias = Callable[[nn.Module, int], nn.Module]
"""Returns the module to use for a stage, given its module and number."""


@dataclass(slots=True, weakref_slot=True)
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
        if self.batch_dims.compares:
            self.schedule._cutter_for = self.batch_dims.fitted

    def parameters(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """The parameters of this process: stage, name in the model, and parameter."""
        for stage in sorted(self.model.modules):
            for name, parameter in named_parameters(self.model.modules[stage]).items():
                yield stage, self.model.name(stage, name), parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process, each once, under the name that the model lists first."""
        seen: set[int | str] = set()
        first = self.model.first_names()
        for _, name, parameter in self.parameters():
            if id(parameter) not in seen:
                known = first.get(name, name)
                # Two stages here may have a copy each, if both are sharded.
                known = name if known in seen else known
                seen |= {id(parameter), known}
                yield known, parameter

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

    def held(self) -> HeldModel:
        """What this process saves and loads."""
        return HeldModel(self.model, Processes(self.ranks.everyone), self.schedule)

    @contextmanager
    def everywhere(self, call: str) -> Iterator[None]:
        """Inside, every rank is in the same call; an error on one is raised on all."""
        with guarded(self.ranks.transport, call):
            self.schedule._runner.arrive(call)
            yield

    def summary(self) -> str:
        """One line: the schedule, the ranks, and numbers."""
        return (
            f"{self.plan.name} on {self.ranks}: {self.plan.stages} stages, "
            f"{self.plan.microbatches} micro-batches, {self.ranks.device}"
        )

    def __str__(self) -> str:
        parts = (self.table, self.batch_dims, self.schedule._runner.captured)
        return "\n".join(filter(None, map(str, parts)))


def build(given: SimpleNamespace) -> Built:
    """Cut the model, keep and move the stages of this process, and make the schedule.

    ``given`` are the arguments of :class:`taktline.Pipeline`, checked.
    """
    if isinstance(given.model, nn.Module) and "_orig_mod" in given.model._modules:
        given.model = without_compiler(given.model)
    before = named_parameters(given.model) if isinstance(given.model, nn.Module) else {}
    ranks = find_ranks(
        given.ranks,
        given.mesh,
        given.data_parallel,
        given.device or _device_of(given.model),
        default=_ranks_of(given.schedule),
        timeout=given.timeout,
    )
    with guarded(ranks.transport, BUILDING):
        plan, modules = _cut_together(given, ranks, None)
        if given.measure:  # now that all ranks have the same model, and can cut it
            plan, modules = _cut_together(given, ranks, shared_times(ranks))
        state = state_of(given.model, modules, ranks.transport)
        table = StageTable.of(plan, modules, given.example, ranks.transport)
        table.prepared = given.prepare is not None
        own = kept(modules, _own_stages(ranks, plan))
        ready = together(ranks, lambda: _ready(given, own, ranks), lambda _: Compared())
        state.modules = {s: wrapped(part, ranks, given.data_parallel) for s, part in ready.items()}
    options = _options(given, ranks, modules.values())
    built = Built(ranks, plan, state, table, given.example, options)
    ranks.own_groups.keep_for(built.schedule, *state.modules.values())
    _mark_replaced(before, {name: parameter for _, name, parameter in built.parameters()})
    with guarded(ranks.transport, BUILDING):
        built.schedule._runner.connect()
    return built


_OF_SCHEDULE = (
    "cuda_graphs",
    "run_ahead",
    "check_finite",
    "args_chunk_spec",
    "kwargs_chunk_spec",
    "output_merge_spec",
    "target_chunk_spec",
)


def _options(given: SimpleNamespace, ranks: Ranks, modules: Iterable[nn.Module]) -> dict[str, Any]:
    """The options of the schedule."""
    return {
        **{name: getattr(given, name) for name in _OF_SCHEDULE},
        "loss_fn": given.loss_fn or loss_in_output,
        "seed": None if given.seed is None else given.seed + ranks.replica,
        "dynamic_shapes": given.dynamic_shapes or any(map(has_dynamic_shapes, modules)),
    }


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


def _cut_together(
    given: SimpleNamespace, ranks: Ranks, measure: Measure | None
) -> tuple[Plan, dict[int, nn.Module]]:
    """Cut the model on all ranks; if any cannot, or they differ, all raise why."""
    alone = all(transport.size == 1 for transport in ranks.everyone)
    options = {"seed": given.seed, "data_parallel": given.data_parallel}
    return together(
        ranks,
        lambda: _cut(given, ranks, measure),
        lambda cut: Compared() if alone else Compared.of(*cut, **options),
    )


def _cut(
    given: SimpleNamespace, ranks: Ranks, measure: Measure | None
) -> tuple[Plan, dict[int, nn.Module]]:
    """The plan, and all stages; or those of this process, if it was given only some.

    Other ranks are asked for the times of layers alone.
    """
    model = given.model
    plan = plan_for(
        opened(given.schedule),
        ranks=ranks.size,
        microbatches=given.microbatches,
        stages=stages_in(model, given.cuts),
        stages_per_rank=given.stages_per_rank,
    )
    if ranks.in_one_process and isinstance(model, nn.Module) and not isinstance(model, Pipe):
        # As a whole, before it is cut: then it shares all tensors with its stages.
        materialise(model, ranks.device, state_dict=given.state_dict)
    modules = take_apart(model, plan, given.example, given.cuts, measure)
    own = kept(modules, _own_stages(ranks, plan))
    return plan, own if isinstance(model, Mapping) else modules


def _own_stages(ranks: Ranks, plan: Plan) -> list[int]:
    return [stage for rank in ranks.own for stage in plan.placement.stages_of(rank)]


def _ready(
    given: SimpleNamespace, modules: Mapping[int, nn.Module], ranks: Ranks
) -> dict[int, nn.Module]:
    """The stages of this process with their values, prepared and compiled."""
    for module in modules.values():
        materialise(module, ranks.device, state_dict=given.state_dict)
    if given.data_parallel == "fsdp":
        separate(modules.values())
    found: dict[int, nn.Module] = {}
    for stage, module in modules.items():
        ready = module if given.prepare is None else given.prepare(module, stage)
        if not isinstance(ready, nn.Module):
            raise MismatchError(
                f"prepare must return the module to use for stage {stage}, not {ready!r}"
            )
        found[stage] = compile_stages(ready, stage) if given.compile else ready
    if given.data_parallel is None:
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


def shared_times(ranks: Ranks) -> Measure:
    """Returns the times that the first process of all replicas has measured, on its device."""
    processes = Processes(ranks.everyone)

    def measure(model: nn.Module, units: Iterable[str], call: Call) -> dict[Cut, float]:
        def measured() -> list[tuple[str, int, float]]:
            if processes.place:
                return []
            times = measure_times(model, units, call, ranks.device)
            return [(cut.unit, cut.call, took) for cut, took in times.items()]

        found = processes.everywhere(measured, "measure the layers", "Pipeline(measure=True)")
        rows = conform(found[0], [(str, int, float)], what="the times of layers")
        return {Cut(unit, at): took for unit, at, took in rows}

    return measure
