"""A stage of a model that was cut by names: a module that runs its steps of the recorded forward.

The first call of a kind (shapes, types, constants, modes) records the forward; each later one looks
up what that has shown, and runs the steps of the stage.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.errors import PartitionError
from taktline.split.arguments import (
    Args,
    Call,
    Kwargs,
    device_of,
    key_of,
    require_no_cache,
    without_cache,
)
from taktline.split.cut import StagePlan, StepPlacement, starts_of
from taktline.split.empty_model import EmptyModel
from taktline.split.program import OtherTypes, StageProgram
from taktline.split.record import record_twice
from taktline.split.steps import Cut, Modes, Record
from taktline.split.without_data import Casts
from taktline.text import counted

KINDS = 256
"""How many kinds of calls are known at a time, and how many of one kind that read other numbers."""


class Known(NamedTuple):
    """A recorded forward, cut into stages."""

    record: Record
    plans: list[StagePlan]


class CutModel:
    """What the stages of a model have in common.

    Args:
        empty: the model without data.
        cuts: the calls of units with which stages begin, from the second on.
        arguments: the names of the arguments of the model's forward.
        starts: finds the steps with which stages begin, instead of cuts.
    """

    def __init__(
        self,
        empty: EmptyModel,
        cuts: Sequence[Cut],
        arguments: Sequence[str],
        starts: Callable[[Record], list[int]] | None = None,
    ) -> None:
        self.empty, self.cuts, self.arguments = empty, tuple(cuts), tuple(arguments)
        self.starts = starts or partial(starts_of, cuts=self.cuts, name=empty.kind.__name__)
        self.homes: dict[str, frozenset[int]] = {}
        """The stages that have each unit, and each parameter that the forward itself uses."""
        self.is_example = False
        """Whether an example has shown the homes."""
        self.first: Known | None = None
        self.known: Callable[[Any], list[Known]] = lru_cache(KINDS)(lambda kind: [])
        """The recorded forwards of a kind, which differ in the numbers that they read."""
        self.lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> CutModel:
        return self

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.cuts) + 1 if self.first is None else len(self.first.plans)

    def learn(
        self,
        key: Any,
        call: Call,
        training: bool,
        place: int,
        record: Record | None = None,
        casts: Casts | None = None,
        device: torch.device | None = None,
    ) -> Known:
        """Record a call of a kind; ``place`` is how many of that kind are known to differ."""
        with self.lock:
            found = self.known(key)
            if place < len(found):
                return found[place]
            if self.empty.model.training != training:
                self.empty.model.train(training)
            record = record or record_twice(self.empty, call, casts, device)
            known = Known(record, StepPlacement(record, self.starts(record)).plans())
            if self.first is not None and len(known.plans) != self.stages:
                raise PartitionError(
                    f"the forward of {self.empty.kind.__name__} has {len(known.plans) - 1} split "
                    f"points in this call, and {self.stages - 1} in the example; let it call "
                    "pipe_split() as often, also in evaluation"
                )
            self._require_at_home(known)
            self.first = self.first or known
            found.append(known)
            del found[:-KINDS]
            return known

    def _require_at_home(self, known: Known) -> None:
        """Raise if a stage uses a unit or a parameter of another stage."""
        for stage, plan in enumerate(known.plans):
            states = plan.states(known.record, is_last=stage == self.stages - 1)
            for name in (*plan.units, *states):
                homes = self.homes.get(name, {stage})
                if stage not in homes:
                    does = "calls" if name in plan.units else "uses the parameter"
                    advice = "call by_names with example=, the arguments of the model"
                    if self.is_example:
                        advice = "call the model as in the example, or cut it by hand"
                    raise PartitionError(
                        f"the forward {does} {name!r} in stage {stage}, but it is in stage "
                        f"{min(homes)}; {advice}"
                    )


class StageRunner:
    """Runs one stage; it holds no tensors, so that copies of the stage share it."""

    def __init__(self, cut: CutModel, stage: int) -> None:
        self.cut, self.stage = cut, stage
        self.programs = lru_cache(KINDS)(_no_programs)
        self.casts: dict[torch.dtype, torch.dtype] = {}
        """The types that units return, where they differ from those of the record."""
        self.lead: tuple[str, ...] = ()
        """The path of a parameter, whose type is that of the stage."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StageRunner:
        return self

    def run(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Run the stage; returns what the next one needs, or the model's output."""
        received, call = self._received(args, kwargs)
        program, tensors = self._program(module, call, received)
        expected = len(program.plan.received)
        if len(received) != expected:
            raise PartitionError(
                f"stage {self.stage} takes {counted(expected, 'tensor')} of stage "
                f"{self.stage - 1}, and got {len(received)}; pass what that stage of the same "
                "model returns"
            )
        try:
            return program.call(module, received, call, tensors)
        except OtherTypes as other:
            recorded, found = other.args
            if self.casts.get(recorded) is found:
                raise
            self.casts = {**self.casts, recorded: found}
            self.programs.cache_clear()
        return self.run(module, args, kwargs)

    def _received(self, args: Args, kwargs: Kwargs) -> tuple[tuple[Any, ...], Call]:
        """The values from the stage before, and the arguments of the model."""
        if self.stage == 0:
            require_no_cache(kwargs)
            return (), (args, without_cache(self.cut.arguments[len(args) :], kwargs))
        if len(args) != 3 or not isinstance(args[0], tuple):
            raise PartitionError(
                f"stage {self.stage} takes what stage {self.stage - 1} returns, not the arguments "
                "of the model: those go to stage 0"
            )
        # Keywords of a rank reach all its stages; the model's came from the stage before.
        return args[0], (args[1], args[2])

    def _program(
        self, module: nn.Module, call: Call, received: tuple[Any, ...]
    ) -> tuple[StageProgram, list[Any]]:
        """What to run for a call, and the tensors in its arguments."""
        tensors: list[Any] = []
        kind, training = key_of(call, tensors), module.training
        devices = _devices_of((*tensors, *received))
        is_inference = torch.is_inference_mode_enabled()
        programs = self.programs(
            (
                *(kind, training, is_inference, torch.is_grad_enabled(), self._type_of(module)),
                *[torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in devices],
            )
        )
        for program in programs:
            if program.holds(module, tensors, received):
                return program, tensors
        with self.cut.lock:
            key = (kind, training, Modes.now(devices), is_inference)
            program = self._learn(module, key, (call, tensors, received))
            programs.append(program)
            del programs[:-KINDS]
        return program, tensors

    def _learn(
        self, module: nn.Module, key: Any, given: tuple[Call, list[Any], Any]
    ) -> StageProgram:
        """A program of what other stages have learned, or else of a new record."""
        (call, tensors, received), cut, at = given, self.cut, self.stage
        cut.empty.follow_types(module)
        key = (*key, cut.empty.retyped, *self.casts.items())
        known, place = len(cut.known(key)), 0
        while True:
            record, plans = cut.learn(
                key, call, module.training, place, None, self.casts, device_of((tensors, received))
            )
            rest = plans[at + 1].arguments if at + 1 < len(plans) else None
            program = StageProgram(record, plans[at], rest)
            if place == known or program.holds(module, tensors, received):
                return program
            place += 1

    def _type_of(self, module: nn.Module) -> torch.dtype | None:
        """The type of the stage, which may change: ``model.double()``."""
        if not self.lead:
            return None
        *path, key = self.lead
        holder: Any = module
        for each in path:
            holder = holder._modules[each]
        return holder._parameters[key].dtype


def _no_programs(_: Any) -> list[StageProgram]:
    return []


def _devices_of(tensors: Sequence[Any]) -> tuple[str, ...]:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            return ("cpu",) if tensor.is_cpu or tensor.is_meta else ("cpu", tensor.device.type)
    return ("cpu",)


class RecordedStage(nn.Module):
    """A stage: the model's own modules, parameters and buffers under the model's names."""

    def __init__(self, runner: StageRunner) -> None:
        super().__init__()
        self._runner = runner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage."""
        return self._runner.run(self, args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the units of this stage."""
        cut, stage = self._runner.cut, self._runner.stage
        for name in cut.empty.modules:
            if stage in cut.homes[name]:
                unit = self.get_submodule(name)
                unit._compiled_call_impl = torch.compile(_call_of(unit), *args, **kwargs)


def _call_of(unit: nn.Module) -> Callable[..., Any]:
    """The call of a module as a function of ours: torch does not compile its own functions."""
    return lambda *args, **kwargs: unit._call_impl(*args, **kwargs)


class Holder(nn.Module):
    """In the place of a module around others that stages have, or of one of another stage."""


def make_stage(model: nn.Module, cut: CutModel, stage: int) -> RecordedStage:
    """The module of a stage, with the modules and tensors of the model that it has."""
    runner = StageRunner(cut, stage)
    made = RecordedStage(runner)
    made.training = model.training
    units = cut.empty.modules
    for name in (n for n in dict.fromkeys((*units, *cut.homes)) if stage in cut.homes[n]):
        path, _, key = name.rpartition(".")
        source, holder = model.get_submodule(path), _holder(model, made, path)
        if name in units:
            holder._modules[key] = source._modules[key]
        elif key in source._buffers:
            persistent = key not in source._non_persistent_buffers_set
            holder.register_buffer(key, source._buffers[key], persistent)
        else:
            holder._parameters[key] = source._parameters[key]
    floats = (name for name, tensor in made.named_parameters() if tensor.is_floating_point())
    runner.lead = tuple(filter(None, next(floats, "").split(".")))
    return made


def _holder(model: nn.Module, made: nn.Module, path: str) -> nn.Module:
    """The module at a path in a stage."""
    holder: Any = made
    source: Any = model
    for key in path.split(".") if path else ():
        source = source._modules[key]
        if key not in holder._modules:
            kinds = (nn.ModuleList, nn.ModuleDict)
            kind = next((kind for kind in kinds if isinstance(source, kind)), Holder)
            holder._modules[key] = kind()
            holder._modules[key].training = source.training
        holder = holder._modules[key]
    return holder


def crossings_of(stage_module: nn.Module) -> list[str]:
    """Names of the tensors that a stage hands to the next one besides the model's arguments."""
    runner: StageRunner | None = vars(stage_module).get("_runner")
    if runner is None or runner.cut.first is None:
        return []
    record, plans = runner.cut.first
    return [record.names[value] for value in plans[runner.stage].sent]


def has_dynamic_shapes(stage_module: nn.Module) -> bool:
    """Whether the shapes of tensors between stages depend on data, as far as a call has shown."""
    runner: StageRunner | None = vars(stage_module).get("_runner")
    if runner is None or runner.cut.first is None:
        return False
    record, plans = runner.cut.first
    return any(not record.sized.isdisjoint(plan.sent) for plan in plans)


def model_of(stage_module: nn.Module) -> nn.Module | None:
    """The whole model without data, if a module is a stage of one that was cut by names."""
    runner: StageRunner | None = vars(stage_module).get("_runner")
    return None if runner is None else runner.cut.empty.model


_TABLES = {key for key, value in vars(nn.Module()).items() if isinstance(value, (dict, set))}
"""Buffers, hooks and the like: registering one with a copy must not change the model."""


def with_own_tables(module: nn.Module) -> nn.Module:
    """A copy of a module and its submodules, with the same tensors."""
    made = object.__new__(type(module))
    made.__dict__ = {k: copy.copy(v) if k in _TABLES else v for k, v in vars(module).items()}
    made._modules = {
        key: None if child is None else with_own_tables(child)
        for key, child in module._modules.items()
    }
    return made
