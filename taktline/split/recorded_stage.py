"""A stage of a model that was cut by names: a module that runs its steps of the recorded forward.

The first call of a kind (shapes, types, constants, modes) records the forward; each later one looks
up what that has shown, and runs the steps of the stage.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.errors import PartitionError
from taktline.split.arguments import Args, Call, Kwargs
from taktline.split.cut import Placement, StagePlan
from taktline.split.empty_model import EmptyModel
from taktline.split.hugging_face import require_no_cache, without_cache
from taktline.split.kinds import Latest, key_of
from taktline.split.program import write_guards, write_stage
from taktline.split.record import record_twice
from taktline.split.run_steps import Differs, OtherTypes
from taktline.split.steps import Cut, Modes, Record
from taktline.split.without_data import Casts, has_data
from taktline.text import counted


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
    """

    def __init__(self, empty: EmptyModel, cuts: Sequence[Cut], arguments: Sequence[str]) -> None:
        self.empty, self.cuts, self.arguments = empty, tuple(cuts), tuple(arguments)
        self.homes: dict[str, frozenset[int]] = {}
        """The stages that have each unit, and each parameter that the forward itself uses."""
        self.is_example = False
        """Whether an example has shown the homes."""
        self.first: Known | None = None
        self._known: Latest[list[Known]] = Latest()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> CutModel:
        return self

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.cuts) + 1

    def learn(
        self,
        key: Any,
        call: Call,
        training: bool,
        place: int,
        record: Record | None = None,
        casts: Casts | None = None,
    ) -> Known:
        """Record a call of a kind; ``place`` is how many of that kind are known to differ."""
        with self._lock:
            found = self._known.get(key, [])
            if place < len(found):
                return found[place]
            if self.empty.model.training != training:
                self.empty.model.train(training)
            record = record or record_twice(self.empty, call, casts)
            known = Known(record, Placement(record, self.cuts, self.empty.kind.__name__).plans())
            if self.homes:
                self._require_at_home(known)
            self.first = self.first or known
            self._known.keep(key, [*found, known])
            return known

    def _require_at_home(self, known: Known) -> None:
        """Raise if a stage uses a unit or a parameter of another stage."""
        for stage, plan in enumerate(known.plans):
            last = stage == self.stages - 1
            for name in (*plan.units, *plan.states(known.record, is_last=last)):
                homes = self.homes.get(name, frozenset({stage}))
                if stage not in homes:
                    does = "calls" if name in plan.units else "uses the parameter"
                    advice = "call by_names with example=, the arguments of the model"
                    if self.is_example:
                        advice = "call the model as in the example, or cut it by hand"
                    raise PartitionError(
                        f"the forward {does} {name!r} in stage {stage}, but it is in stage "
                        f"{min(homes)}; {advice}"
                    )


class _Program:
    """How one stage runs calls of a kind."""

    def __init__(self, known: Known, stage: int) -> None:
        record, plan = known.record, known.plans[stage]
        rest = known.plans[stage + 1].arguments if stage + 1 < len(known.plans) else None
        self.received = len(plan.received)
        self.guards = write_guards(record, plan)
        self.run = write_stage(record, plan, rest)
        self.first = write_stage(record, plan, rest, checks=True)
        self.is_checked = False

    def holds(self, module: nn.Module, tensors: list[Any]) -> bool:
        """Whether the forward reads the same numbers from these arguments."""
        if self.guards is None:
            return True
        try:
            self.guards(module, (), tensors)
        except Differs:
            return not has_data(tensors)  # as in a run that only counts
        return True

    def call(self, module: nn.Module, received: tuple[Any, ...], tensors: list[Any]) -> Any:
        """Run the stage; the first time, compare types."""
        if self.is_checked:
            return self.run(module, received, tensors)
        output = self.first(module, received, tensors)
        self.is_checked = True
        return output


class StageRunner:
    """Runs one stage; it holds no tensors, so that copies of the stage share it."""

    def __init__(self, cut: CutModel, stage: int) -> None:
        self.cut, self.stage = cut, stage
        self._programs: Latest[list[_Program]] = Latest()
        self._casts: dict[torch.dtype, torch.dtype] = {}
        """The types that units return, where they differ from those of the record."""
        self.lead: tuple[str, ...] = ()
        """The path of a parameter, whose type is that of the stage."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StageRunner:
        return self

    @property
    def is_last(self) -> bool:
        """Whether the stage returns the output of the model."""
        return self.stage == self.cut.stages - 1

    def run(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Run the stage; returns what the next one needs, or the model's output."""
        received, call = self._received(args, kwargs)
        tensors: list[Any] = []
        key = (
            key_of(call, tensors),
            module.training,
            Modes.now(_devices_of(tensors)),
            torch.is_inference_mode_enabled(),
            self._type_of(module),
        )
        try:
            programs = self._programs.get(key)
        except TypeError as error:
            raise PartitionError(
                f"an argument of the model cannot be compared with that of other calls ({error}); "
                "pass tensors, numbers and texts, also in lists, dicts and dataclasses"
            ) from None
        if programs is None:
            programs = [self._learn(module, key, call, 0)]
            self._programs.keep(key, programs)
        program = next((each for each in programs if each.holds(module, tensors)), None)
        if program is None:
            program = self._learn(module, key, call, len(programs))
            programs.append(program)
        expected = program.received
        if len(received) != expected:
            raise PartitionError(
                f"stage {self.stage} takes {counted(expected, 'tensor')} of stage "
                f"{self.stage - 1}, and got {len(received)}; pass what that stage of the same "
                "model returns"
            )
        try:
            return program.call(module, received, tensors)
        except OtherTypes as other:
            if self._casts.get(other.recorded) is other.found:
                raise
            self._casts = {**self._casts, other.recorded: other.found}
            self._programs.clear()
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

    def _type_of(self, module: nn.Module) -> torch.dtype | None:
        """The type of the stage, which may change: ``model.double()``."""
        if not self.lead:
            return None
        *path, key = self.lead
        holder: Any = module
        for each in path:
            holder = holder._modules[each]
        return holder._parameters[key].dtype

    def _learn(self, module: nn.Module, key: Any, call: Call, place: int) -> _Program:
        self.cut.empty.follow_types(module)
        key = (*key[:-1], self.cut.empty.retyped, *self._casts.items())
        known = self.cut.learn(key, call, module.training, place, casts=self._casts)
        return _Program(known, self.stage)


def _devices_of(tensors: Sequence[Any]) -> tuple[str, ...]:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            return ("cpu",) if tensor.is_cpu or tensor.is_meta else ("cpu", tensor.device.type)
    return ("cpu",)


class RecordedStage(nn.Module):
    """A stage: the model's own modules, parameters and buffers under the model's names."""

    def __init__(self, runner: StageRunner) -> None:
        super().__init__()
        self.__dict__["_runner"] = runner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage."""
        runner: StageRunner = self.__dict__["_runner"]
        return runner.run(self, args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the units of this stage."""
        runner: StageRunner = self.__dict__["_runner"]
        for name, homes in runner.cut.homes.items():
            if runner.stage in homes and name in runner.cut.empty.modules:
                unit = self.get_submodule(name)
                unit._compiled_call_impl = torch.compile(_call_of(unit), *args, **kwargs)


def _call_of(unit: nn.Module) -> Callable[..., Any]:
    """The call of a module as a function of ours: torch does not compile its own functions."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return unit._call_impl(*args, **kwargs)

    return call


class Holder(nn.Module):
    """In the place of a module around others that stages have, or of one of another stage."""


def make_stage(model: nn.Module, cut: CutModel, stage: int) -> RecordedStage:
    """The module of a stage, with the modules and tensors of the model that it has."""
    runner = StageRunner(cut, stage)
    made = RecordedStage(runner)
    made.training = model.training
    places = {name: at for at, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    units = cut.empty.modules
    for name in sorted((n for n in cut.homes if n in units), key=lambda n: places[n]):
        if stage in cut.homes[name]:
            path, _, key = name.rpartition(".")
            _holder(model, made, path)._modules[key] = model.get_submodule(name)
    for name in (n for n in cut.homes if n not in units and stage in cut.homes[n]):
        path, _, key = name.rpartition(".")
        source, holder = model.get_submodule(path), _holder(model, made, path)
        if holder is source:
            continue  # it has it already, as a unit of this stage
        if key in source._buffers:
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
    if runner is None or runner.cut.first is None or runner.is_last:
        return []
    known = runner.cut.first
    return [known.record.names[value] for value in known.plans[runner.stage].sent]


def has_dynamic_shapes(stage_module: nn.Module) -> bool:
    """Whether the shapes of tensors between stages depend on data, as far as a call has shown."""
    runner: StageRunner | None = vars(stage_module).get("_runner")
    first = None if runner is None else runner.cut.first
    return first is not None and any(
        not first.record.sized.isdisjoint(plan.sent) for plan in first.plans
    )


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
