"""Builds a pipeline: checks the arguments, finds the ranks and the plan, and cuts the model.

Then each process keeps its own stages, gives them their values, prepares, compiles and wraps them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from taktline import split
from taktline.checkpoint.model_state import ModelState, Processes
from taktline.checkpoint.pretrained import conversions_of
from taktline.checks import check, check_callable, check_list, check_one_of, conform
from taktline.device import require_usable_device
from taktline.errors import (
    MismatchError,
    PartitionError,
    ScheduleError,
    TaktlineError,
    UseError,
    text_of,
)
from taktline.plan import Kind, NamedSchedule, Plan, find, read
from taktline.plan.estimate import AT_ONCE, RankLimit, estimate, memory_table
from taktline.plan.io import read_cuts
from taktline.runtime import ScheduleFromPlan
from taktline.runtime.introduction import BUILDING, compared, together
from taktline.runtime.runnable_plan import Limits
from taktline.runtime.schedule import Schedule
from taktline.runtime.watchdog import guarded
from taktline.split import Pieces, Pipe, materialise
from taktline.split.auto import Measure, divide, measure_times
from taktline.split.by_names import without_compiler
from taktline.split.steps import Cut, Record, arguments_of, arguments_of_forward, without_padding
from taktline.stage import PipelineStage, compile_stages
from taktline.stage.kinds import summary
from taktline.stage.names import declared, named_parameters, unwrapped
from taktline.stage.streaming import Parts, Streamed
from taktline.text import counted
from taktline.train.auto import check_auto, choose, is_auto, rechosen
from taktline.train.batches import BatchDims
from taktline.train.memory import fitted
from taktline.train.rank_limits import check_limits, cuts_within, stage_bytes
from taktline.train.ranks import Ranks, find_ranks, require_separate, require_wrapped, wrapped
from taktline.train.recompute import check_checkpoint, recompute, require_some
from taktline.train.stage_table import StageTable
from taktline.train.weights import check_streams, require_streams, require_trainable

Model: TypeAlias = nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module]
"""A model, a list of its stages, or the stages of this process by their numbers."""
Prepare: TypeAlias = Callable[[nn.Module, int], nn.Module]
"""Returns the module to use for a stage, given its module and number."""
ScheduleChoice: TypeAlias = str | os.PathLike[str] | Plan | type[Schedule]
"""A name, a file, a plan, or the class of a schedule."""


_FLAGS = (
    *("dynamic_shapes", "cuda_graphs", "compile", "measure", "check_finite", "stream_weights"),
    "elastic",
)
_CHECKS: dict[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(_FLAGS, partial(check, kind=bool)),
    **dict.fromkeys(("loss_fn", "prepare", "on_preempt"), check_callable),
    "microbatches": partial(check, kind=int, least=1, error=ScheduleError),
    "stages_per_rank": partial(check, kind=int, least=1, error=ScheduleError),
    "seed": partial(check, kind=int),
    "mesh": partial(check, kind=DeviceMesh),
    "checkpoint": check_checkpoint,
    "data_parallel": partial(check_one_of, choices=("ddp", "fsdp"), error=MismatchError),
    "device": lambda _, device: require_usable_device(device),
    "example": lambda _, example: arguments_of(example),
    "cuts": partial(check_list, takes="a list of names of submodules", error=PartitionError),
}


def checked(arguments: dict[str, Any]) -> SimpleNamespace:
    """The arguments of a pipeline by name; raises unless each is valid, as far as one can see."""
    given = SimpleNamespace(**arguments)
    del given.self
    for name, require in _CHECKS.items():
        if arguments[name] is not None or name in _FLAGS:
            setattr(given, name, require(name, arguments[name]))
    given.is_whole, given.is_own = isinstance(given.model, nn.Module), False
    given.starts = None
    if isinstance(given.model, Pipe):
        given.is_whole = False
        given.model = [given.model.get_stage_module(s) for s in range(given.model.num_stages)]
    if not given.is_whole:
        given.is_own = isinstance(given.model, Mapping)
        given.model = _stages_given(given.model)
    if given.measure and (not given.is_whole or given.example is None or given.cuts is not None):
        raise PartitionError(
            "measure=True cuts a model by the times of its layers: pass the whole model and "
            "example=(…), the arguments of one micro-batch, and no cuts; or leave out measure=True"
        )
    given.limits = None
    if isinstance(given.ranks, Sequence) and not isinstance(given.ranks, str):
        given.limits = RankLimit.read(given.ranks)
        given.ranks = len(given.limits)
        check_limits(given, is_auto=is_auto(given.schedule))
    check_auto(given)
    check_streams(given, is_auto=is_auto(given.schedule))
    if given.timeout is not None and not isinstance(given.timeout, timedelta):
        given.timeout = timedelta(seconds=check("timeout", given.timeout, float, least=0.001))
    return given


def _stages_given(model: Any) -> dict[int, nn.Module]:
    """Stages by their numbers, of a list or a dict of them."""
    if isinstance(model, str) or not isinstance(model, Sequence | Mapping):
        raise PartitionError(
            f"a model is an nn.Module, a list of stages or a dict of them, not {model!r}"
        )
    stages = dict(model if isinstance(model, Mapping) else enumerate(model))
    for stage, module in stages.items():
        if not isinstance(module, nn.Module):
            raise PartitionError(f"stage {stage} is {module!r}, not an nn.Module")
    return stages


def _ranks_of(schedule: ScheduleChoice) -> int:
    """The default number of ranks in one process."""
    with suppress(TaktlineError):  # raised later, on all ranks
        chosen = _opened(schedule)
        return chosen.ranks if isinstance(chosen, Plan) else 1
    return 1


def _opened(schedule: ScheduleChoice) -> Plan | NamedSchedule:
    """The plan, if one was given or is in a file; else the schedule of that name."""
    if isinstance(schedule, Plan):
        return schedule
    if isinstance(schedule, type) and issubclass(schedule, Schedule):
        return find(schedule.__name__)
    if is_file(schedule):
        return read(schedule)
    if isinstance(schedule, str):
        return find(schedule)
    raise ScheduleError(f"schedule is a name, a plan, a file or a Schedule class, not {schedule!r}")


def is_file(schedule: object) -> TypeGuard[str | os.PathLike[str]]:
    if isinstance(schedule, str):
        return schedule.lower().endswith((".csv", ".json"))
    return isinstance(schedule, os.PathLike)


_OF_SCHEDULE = (
    *("loss_fn", "seed", "dynamic_shapes", "cuda_graphs", "check_finite"),
    *("args_chunk_spec", "kwargs_chunk_spec", "output_merge_spec", "target_chunk_spec"),
)
"""Arguments that are options of the schedule."""


def build(given: SimpleNamespace) -> Built:
    """Cut the model, keep and move the stages of this process, and make the schedule.

    ``given`` are the arguments of :class:`taktline.Pipeline`, checked.
    """
    if given.is_whole and "_orig_mod" in given.model._modules:
        given.model = without_compiler(given.model)
    ranks = find_ranks(
        given.ranks,
        given.mesh,
        given.data_parallel,
        given.device or _device_of(given),
        default=_ranks_of(given.schedule),
        timeout=given.timeout,
    )
    alone = max(ranks.processes.sizes) == 1
    names = ("seed", "data_parallel", "stream_weights")
    told = {name: getattr(given, name) for name in names} | {"ranks": given.limits}

    def cut(measure: Measure | None) -> tuple[Plan, dict[int, nn.Module]]:
        """Cut the model on all ranks; if any cannot, or they differ, all raise why."""
        return together(
            ranks,
            lambda: _cut(given, ranks, measure),
            lambda made: {} if alone else compared(*made, **told),
        )

    choice = ""
    with guarded(ranks.transport, BUILDING):
        if is_auto(given.schedule):
            choice = choose(given, ranks)
        plan, modules = cut(None)
        if given.measure:  # now that all ranks have the same model, and can cut it
            plan, modules = cut(_shared_times(ranks))
        state = _state_of(given, modules, ranks)
        table = StageTable.of(plan, modules, given.example, ranks.transport)
        table.prepared = (given.prepare or given.checkpoint) is not None
        if given.memory is not None and not choice:
            streams = given.stream_weights
            plan = fitted(plan, table, modules, given.memory, ranks, streams=streams)
            table.plan = plan
        table.limits = given.limits or ()
        if given.limits and table.needs is not None:
            listed = [modules[stage] for stage in range(plan.stages)]
            sizes = stage_bytes(listed, table.needs, streams=given.stream_weights)
            found = estimate(plan, sizes)
            table.memory = memory_table(found, given.limits)
        own = {stage: modules[stage] for stage in ranks.stages_of(plan)}
        ready, streams = together(ranks, lambda: _ready(given, own, ranks))
        if given.checkpoint is not None:
            require_some([*ready.values()], ranks)
        state.modules = {
            stage: wrapped(part, ranks, given.data_parallel, streams.get(stage))
            for stage, part in ready.items()
        }
    options: dict[str, Any] = {name: getattr(given, name) for name in _OF_SCHEDULE}
    options["seed"] = None if given.seed is None else given.seed + ranks.replica
    if given.stream_weights:
        options["limits"] = Limits(max_active_stages=AT_ONCE)
    built = Built(ranks, plan, state, table, given.example, options, streams)
    built.choice, built.starts = choice, given.starts
    built.example_target, built.memory = given.example_target, given.memory
    built.target = given.example_target
    with guarded(ranks.transport, BUILDING):
        built.schedule._runner.connect()
    return built


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
    streams: Mapping[int, Streamed] = field(default_factory=dict)
    """The frozen weights of stages here, if they stream."""
    schedule: ScheduleFromPlan = field(init=False)
    """Runs the ranks of this process."""
    batch_dims: BatchDims = field(init=False)
    trains: bool = field(init=False)
    """Whether the plan has a backward."""
    example_target: Any = None
    target: Any = None
    """The target of one micro-batch, without its data, if it is known."""
    memory: Any = None
    """The bytes that ranks may use."""
    choice: str = ""
    """What ``schedule="auto"`` has chosen, and why."""
    starts: list[str] | None = None
    """The submodules with which stages begin, if the model was cut here."""
    keywords: dict[str, Any] = field(init=False)
    """Keyword arguments of the model, unless a call has others."""

    def __post_init__(self) -> None:
        device, group, count = self.ranks.device, self.ranks.group, self.plan.stages
        stages = [
            PipelineStage(module, stage, count, device, group=group)
            for stage, module in self.model.modules.items()
        ]
        for stage in stages:
            stage.streamed = self.streams.get(stage.stage_index)
        self.schedule = ScheduleFromPlan(stages, self.plan, **self.options)
        self.model.processes, self.model.schedule = self.ranks.processes, self.schedule
        if len(self.ranks.own) > 1:
            self.schedule._runner.run_all_ranks(self.ranks.size)
        # Keyword arguments are the model's, so every rank gets the same ones.
        self.schedule._runner.compared = ("args", "kwargs", "target")
        self.batch_dims = BatchDims(self.example, self.schedule._runner.cutter)
        if self.batch_dims.compares:
            self.schedule._runner.cutter_for = self.batch_dims.fitted
        self.trains, self.keywords = self.plan.has(Kind.B, Kind.I), {}
        alone = count == 1 and self.options["kwargs_chunk_spec"] is None
        if alone and "use_cache" in arguments_of_forward(type(unwrapped(self.model.modules[0]))):
            # As in several stages: the caches of micro-batches cannot be joined.
            self.keywords["use_cache"] = False

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
        captures = self.schedule._runner.captures or ""
        compiled = summary(self.model.modules.values())
        parts = (self.table, self.choice, self.batch_dims, compiled, captures)
        return "\n".join(filter(None, map(str, parts)))


def replan(built: Built) -> Built:
    """The same pipeline with the best plan for its stages; all ranks take part."""
    ranks = built.ranks
    if ranks.mesh is not None and ranks.mesh.ndim > 1:
        raise UseError(
            "replan() needs a pipeline without replicas and tensor parallelism; make a pipeline "
            'with schedule="auto", write_plan() its plan, and pass the file as schedule='
        )
    if built.example is None or not built.trains:
        raise UseError(
            "replan() measures training steps of the example: pass example=(…), the arguments of "
            "one micro-batch, when you make the pipeline, and a schedule with a backward"
        )
    with built.everywhere("replan()"):
        plan, text = rechosen(built)
        old, table = built.schedule, replace(built.table, plan=plan)
        found = Built(ranks, plan, built.model, table, built.example, built.options, built.streams)
        found.example_target, found.memory = built.example_target, built.memory
        found.target = built.target
        found.choice, found.starts, found.schedule.steps = text, built.starts, old.steps
        runner, before = found.schedule._runner, old._runner
        runner.stepped_at, runner.stall_after = before.stepped_at, before.stall_after
        runner.connect()
    return found


def _device_of(given: SimpleNamespace) -> torch.device | None:
    """The accelerator that holds the model, if one does."""
    modules = [given.model] if given.is_whole else given.model.values()
    devices = (parameter.device for module in modules for parameter in module.parameters())
    return next((device for device in devices if device.type not in ("cpu", "meta")), None)


def plan_of(given: SimpleNamespace, ranks: int) -> Plan:
    """The plan for so many ranks."""
    schedule, microbatches, stages = _opened(given.schedule), given.microbatches, None
    if given.cuts is not None:
        stages = len(given.cuts) + 1
    elif not given.is_whole and not given.is_own:
        stages = len(given.model)
    if isinstance(schedule, Plan):
        own = schedule.ranks, schedule.microbatches, schedule.stages
        asked = ranks, microbatches or own[1], stages or own[2]
        if asked != own:
            raise ScheduleError(
                f"plan {schedule.name!r} is for {counted(own[0], 'rank')}, "
                f"{counted(own[1], 'micro-batch')} and {counted(own[2], 'stage')}, not "
                f"{asked[0]}, {asked[1]} and {asked[2]}; start as many ranks, leave out ranks and "
                "microbatches, and cut the model into as many stages"
            )
        return schedule
    if microbatches is None:
        raise ScheduleError(f"pass microbatches=…, the number of micro-batches for {schedule.name}")
    per_rank = given.stages_per_rank
    if stages is not None:
        found, rest = divmod(stages, ranks)
        if rest or not found or per_rank not in (None, found):
            asked = f"with {per_rank} on each" if per_rank else "evenly"
            raise ScheduleError(
                f"{counted(stages, 'stage')} cannot be placed on {counted(ranks, 'rank')} {asked}; "
                f"cut the model into {ranks * (per_rank or schedule.stages_per_rank or 1)}"
            )
        per_rank = found
    return schedule.build(ranks, microbatches, per_rank)


def _cut(
    given: SimpleNamespace, ranks: Ranks, measure: Measure | None
) -> tuple[Plan, dict[int, nn.Module]]:
    """The plan and all stages, or only this process's stages if it was given no others.

    ``measure`` returns the times of layers to cut by; without it, their costs are counted.
    """
    for module in [given.model] if given.is_whole else given.model.values():
        require_trainable(module, given.data_parallel)
    cut_already = not given.is_whole or given.cuts is not None or given.measure
    if is_file(given.schedule) and not cut_already:
        given.cuts = read_cuts(given.schedule)
    plan = plan_of(given, ranks.size)
    if given.stream_weights:
        require_streams(plan)
    if given.is_own:
        own = ranks.stages_of(plan)
        if not set(own) <= set(given.model) <= set(range(plan.stages)):
            raise PartitionError(
                f"{plan.name} on {counted(plan.ranks, 'rank')} has stages 0 to {plan.stages - 1}, "
                f"of which {sorted(own)} run here; pass these, not {sorted(given.model)}"
            )
        return plan, {stage: given.model[stage] for stage in own}
    if not given.is_whole:
        return plan, dict(enumerate(split.by_hand(given.model.values())))
    if ranks.in_one_process:
        # As a whole, before it is cut: then it shares all tensors with its stages.
        device = torch.device("cpu") if given.stream_weights else ranks.device
        materialise(given.model, device, state_dict=given.state_dict)
    stages = _stages(given, plan, measure)
    if isinstance(stages, Pieces):
        given.starts = stages.starts
    return plan, dict(enumerate(stages))


def _stages(given: SimpleNamespace, plan: Plan, measure: Measure | None) -> Sequence[nn.Module]:
    """The stages into which a whole model is cut."""
    model, cuts, example = given.model, given.cuts, given.example
    if plan.stages == 1 and not cuts:
        return [model]
    is_own = cuts is None and example is None
    example = _own_example(model) if is_own else example
    try:
        if cuts is None and given.limits:
            streams = given.stream_weights
            cuts = cuts_within(model, plan, example, given.limits, measure, streams=streams)
        if cuts is not None:
            return split.by_names(model, cuts, example=example)
        if example is not None:
            return divide(model, plan.stages, example, measure)
    except Exception as error:  # the model's code runs there
        if isinstance(error, TaktlineError):
            raise
        if not is_own:
            raise PartitionError(
                f"{type(model).__name__} fails on the example, run without data to be cut: "
                f"{type(error).__name__}: {text_of(error)}. If it fails by itself, too, pass "
                "another example; if not, a layer may need the numbers in its buffers or arguments "
                "to know its sizes: pass a list of stages, cut by hand"
            ) from error
    raise PartitionError(
        f"to cut {type(model).__name__} into {plan.stages} stages, pass example=(…), the "
        "arguments of one micro-batch, or cuts=[…], the names of the submodules at which new "
        "stages begin"
    )


def _own_example(model: nn.Module) -> Any:
    """Arguments by which a model of transformers can be cut; None if it says none."""
    dummies, config = getattr(model, "dummy_inputs", None), getattr(model, "config", None)
    if not isinstance(dummies, dict):
        return None
    if getattr(model, "main_input_name", "") == "pixel_values":
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else size or (0, 0)
        return (), {"pixel_values": torch.zeros(1, channels, height, width)}
    # Long enough for layers to compute, and not only to begin.
    length = min(128, getattr(config, "max_position_embeddings", None) or 128)
    found = {name: without_padding(model, each) for name, each in dummies.items()}
    for name, each in found.items():
        if isinstance(each, torch.Tensor) and each.ndim == 2 and not each.is_floating_point():
            found[name] = each.repeat(1, -(-length // each.shape[1]))[:1, :length]
    return (), found


def _shared_times(ranks: Ranks) -> Measure:
    """Returns the times that the first process of all replicas has measured, on its device."""

    def measure(model: nn.Module, record: Record) -> dict[Cut, float]:
        def measured() -> list[tuple[str, int, float]]:
            if ranks.processes.place:
                return []
            times = measure_times(model, record, ranks.device)
            return [(cut.unit, cut.call, took) for cut, took in times.items()]

        call = "Pipeline(measure=True)"
        found = ranks.processes.everywhere(measured, "measure the layers", call)
        rows = conform(found[0], [(str, int, float)], what="the times of layers")
        return {Cut(unit, at): took for unit, at, took in rows}

    return measure


def _state_of(given: SimpleNamespace, modules: dict[int, nn.Module], ranks: Ranks) -> ModelState:
    """The state of a model in these stages; if other processes have the others, all take part."""
    if given.is_own:
        return ModelState.of_stages(modules, Processes([ranks.transport]), BUILDING)
    if not given.is_whole:
        return ModelState.of_stages(modules)
    state = ModelState.of_model(given.model, modules)
    state.conversions = conversions_of(given.model)
    return state


def _ready(
    given: SimpleNamespace, modules: Mapping[int, nn.Module], ranks: Ranks
) -> tuple[dict[int, nn.Module], dict[int, Streamed]]:
    """The stages of this process with their values, prepared and compiled; and what streams."""
    if given.data_parallel == "fsdp":
        require_separate(modules)
    found, streams, parts = dict[int, nn.Module](), dict[int, Streamed](), Parts()
    for stage, module in modules.items():
        materialise(module, ranks.device, state_dict=given.state_dict)
        ready = module if given.prepare is None else given.prepare(module, stage)
        if not isinstance(ready, nn.Module):
            raise MismatchError(
                f"prepare must return the module to use for stage {stage}, not {ready!r}"
            )
        if given.checkpoint is not None:
            recompute(ready, given.checkpoint)
        found[stage] = compile_stages(ready, stage) if given.compile else ready
        if given.stream_weights:  # before the next stage comes to the device
            streams[stage] = Streamed(found[stage], ranks.device, parts)
    if given.data_parallel is None and ranks.replicas > 1:
        require_wrapped(found, ranks)
    return found, streams
