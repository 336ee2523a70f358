"""A stage of a model that was cut by names: a module that runs its steps of the recorded forward.

The first call of a kind (shapes, types, constants, modes) records the forward; each later one looks
up what that has shown, and runs the steps of the stage.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, lru_cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from taktline.errors import PartitionError
from taktline.split.arguments import (
    Absent,
    Call,
    Path,
    State,
    Value,
    arguments_of_forward,
    at_path,
    filled,
    key_of,
    parts_in,
    require_no_cache,
    without_cache,
)
from taktline.split.cut import (
    CheckpointRegion,
    Cut,
    Modes,
    Place,
    Record,
    StagePlan,
    Step,
    StepKind,
    StepPlacement,
    starts_of,
)
from taktline.split.record import record_twice
from taktline.split.without_data import EmptyModel, Types, has_data
from taktline.stage.names import unwrapped
from taktline.text import counted


class Differs(Exception):
    """A number that the forward reads from its arguments is not the one that was recorded."""


Values = dict[Any, Any]
"""The tensors of a call, by the values that stand for them."""
Run = Callable[[Values, nn.Module], None]
"""A part of a stage: what it makes is put among the values."""


class StageProgram:
    """How a stage runs the calls of a kind.

    Args:
        record: the forward.
        plan: what the stage does of it.
        rest: the arguments of the model that later stages need; None for the last stage.
    """

    def __init__(self, record: Record, plan: StagePlan, rest: frozenset[Value] | None) -> None:
        self.record, self.plan = record, plan
        self._is_last = rest is None
        self._given = parts_in(record.given, Value)
        self._inputs = (*self._given, *plan.received)
        given = list(enumerate(self._given))
        self._dropped = [(at, value.absent) for at, value in given if value not in (rest or ())]
        written = {memory for step in record.steps for memory in step.writes}
        self._changed = [at for at, value in given if value.memory in written]
        self._result_states = parts_in(record.result, State) if self._is_last else []
        result = parts_in(record.result, Value) if self._is_last else ()
        self._needed_later = {*plan.sent, *result}

    @property
    def uses(self) -> dict[str, None]:
        """The units, and the parameters and buffers, that the stage itself uses."""
        used = [s for step in (*self.plan.guards, *self.plan.steps) for s in step.states]
        return self.plan.units | {state.name: None for state in (*used, *self._result_states)}

    @cached_property
    def _runs(self) -> list[Run]:
        return self._prepared(self.plan.steps, self._needed_later)

    @cached_property
    def _guards(self) -> list[Run]:
        return self._prepared(self.plan.guards, set(self.record.values))  # lets go of nothing

    def holds(self, stage: nn.Module, tensors: list[Any], received: tuple[Any, ...]) -> bool:
        """Whether the forward reads the same numbers from these arguments."""
        try:
            if self._guards:
                self._run(self._guards, stage, (), tensors)
        except Differs:
            return not has_data([*tensors, *received])  # as in a run that only counts
        return True

    def call(
        self, stage: nn.Module, received: tuple[Any, ...], call: Call, tensors: list[Any]
    ) -> Any:
        """Run the stage."""
        for at in self._changed:
            if any(at != n and _share(tensors[at], other) for n, other in enumerate(tensors)):
                raise PartitionError(
                    f"the forward changes argument {at} of the model in place, but another one is "
                    "the same tensor, or a view of it; pass a copy (x.clone())"
                )
        values = self._run(self._runs, stage, received, tensors)
        if self._is_last:
            self._find_states(self._result_states, values, stage)
            return filled(self.record.result, values)
        sent = tuple([values[value] for value in self.plan.sent])
        if any(type(tensors[at]) is not Absent for at, _ in self._dropped):
            for at, absent in self._dropped:
                tensors[at] = absent
            call = filled(self.record.given, dict(zip(self._given, tensors, strict=True)))
        return (sent, *call)

    def _run(self, runs: list[Run], stage: nn.Module, received: Any, tensors: list[Any]) -> Values:
        values = dict(zip(self._inputs, (*tensors, *received), strict=False))
        for value in self.plan.copied:
            if value in values:
                values[value] = values[value].clone()
        for run in runs:
            run(values, stage)
        return values

    def _find_states(self, states: Sequence[State], values: Values, stage: nn.Module) -> None:
        """Find parameters and buffers; a tied one has one of its names in this stage."""
        for state in states:
            for name in state.names:
                path, _, last = name.rpartition(".")
                with suppress(AttributeError):
                    values[state] = getattr(stage.get_submodule(path), last)

    def _prepared(self, steps: Sequence[Step], later: set[Value], depth: int = 0) -> list[Run]:
        """Functions that run steps; ``later`` are the values that are used after them."""
        found, later, outer = list[Run](), set(later), self.record.modes

        def group_of(step: Step) -> tuple[tuple[CheckpointRegion, ...], Modes | None]:
            region = step.region[depth : depth + 1]
            return region, None if region else step.modes

        for (region, modes), group in reversed([(k, list(g)) for k, g in groupby(steps, group_of)]):
            if modes is None:
                found.append(self._checkpointed(region[0], group, later, depth + 1))
                later.update(value for step in group for value in step.reads)
                continue
            runs = list[Run]()
            for step in reversed(group):
                runs.append(self._layer(step, later) or self._step(step, later))
                later.update(step.reads)
            found += runs if modes == outer else [partial(_run_in, modes, outer, runs[::-1])]
        return found[::-1]

    def _checkpointed(
        self, region: CheckpointRegion, steps: Sequence[Step], later: set[Value], depth: int
    ) -> Run:
        """A function that runs the steps of a checkpointed part."""
        made = {value: None for step in steps for value in step.places}
        needs = {value: None for step in steps for value in step.reads if value not in made}
        returned = [value for value in made if value in later]
        done = [value for value in needs if value not in later]
        runs = self._prepared(steps, later, depth)

        def inside(stage: nn.Module, *given: Any) -> tuple[Any, ...]:
            values = dict[Any, Any](zip(needs, given, strict=True))
            for run in runs:
                run(values, stage)
            return tuple([values[value] for value in returned])

        def run_region(values: Values, stage: nn.Module) -> None:
            found = checkpoint(
                inside, stage, *[values[value] for value in needs],
                use_reentrant=False, preserve_rng_state=region.preserves_rng,
            )  # fmt: skip
            values.update(zip(returned, found, strict=True))
            for value in done:
                del values[value]

        return run_region

    def _layer(self, step: Step, later: set[Value]) -> Run | None:
        """A function that runs a step in less time, if it is a layer: one value in, one out."""
        given, places = step.args[0] if len(step.args) == 1 else None, list(step.places.items())
        is_layer = step.kind is StepKind.UNIT and type(given) is Value and not step.kwargs
        if not is_layer or places[1:] or not places or places[0][1] != Place(()):
            return None
        keys, output, is_done = step.target.split("."), places[0][0], given not in later

        def run(values: Values, stage: nn.Module) -> None:
            layer: Any = stage
            for key in keys:
                layer = layer._modules[key]
            values[output] = layer(values.pop(given) if is_done else values[given])

        return run

    def _step(self, step: Step, later: set[Value]) -> Run:
        """A function that runs one step, and lets go of values that are not used later."""
        function, given, states = step.target, (step.args, step.kwargs), step.states
        is_unit, is_read = step.kind is StepKind.UNIT, step.kind is StepKind.READ
        keys = function.split(".") if is_unit else ()
        outputs = [(v, place.path) for v, place in step.places.items() if place.root == "output"]
        left = [(v, place) for v, place in step.places.items() if place.root != "output"]
        inner = [place for _, place in left if place.root == "inner output"]
        done = [value for value in {*step.reads, *step.places} if value not in later]

        def run(values: Values, stage: nn.Module) -> None:
            target: Any = stage if is_unit else function
            for key in keys:
                target = target._modules[key]
            if states:
                self._find_states(states, values, stage)
            args, kwargs = call = filled(given, values)
            before = [_left_in(target, call, {}, place) for _, place in left]
            if inner:
                with _noting(target, inner) as noted:
                    output = target(*args, **kwargs)
            else:
                output, noted = target(*args, **kwargs), {}
            if is_read and not _same(output, step.found):
                raise Differs if step.is_guard else _differs(step, output)
            if is_unit and step.constants:
                _require_constants(step, output)
            for value, path in outputs:
                values[value] = at_path(output, path)
            for (value, place), old in zip(left, before, strict=True):
                values[value] = _left_in(target, call, noted, place)
                if values[value] is None or values[value] is old:
                    raise _not_left(step, place)
            for value in done:
                values.pop(value, None)

        return run


def _require_constants(step: Step, output: Any) -> None:
    """Raise if a unit returns other numbers than in the record, on which the forward may depend."""
    for path, expected in step.constants:
        found = _at(output, path)
        if found is not expected and (type(found) is not type(expected) or found != expected):
            shown = repr(found) if isinstance(found, (int, float, str)) else type(found).__name__
            raise PartitionError(
                f"{step.target!r} ({step.line}) returns {shown} where it has returned "
                f"{expected!r} when the forward was recorded, which may depend on that; return a "
                "tensor, or nothing"
            )


def _at(value: Any, path: Path) -> Any:
    """The part at a path; None if there is none."""
    with suppress(LookupError, AttributeError, TypeError):
        return at_path(value, path)
    return None


def _share(one: Any, other: Any) -> bool:
    """Whether two tensors are in the same memory."""
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _run_in(
    modes: Modes, outer: Modes, runs: Sequence[Run], values: Values, stage: nn.Module
) -> None:
    """Run steps in other modes of torch than the forward was called in."""
    with modes.instead_of(outer):
        for run in runs:
            run(values, stage)


def _differs(step: Step, found: Any) -> PartitionError:
    return PartitionError(
        f"{step.line} reads {found!r}, where it has read {step.found!r} before: what the forward "
        "does depends on a random number, or on a buffer that changes, which stages cannot decide "
        "by themselves; turn that off (a layerdrop of 0), or move it into a submodule"
    )


def _same(found: Any, expected: Any) -> bool:
    try:
        return bool(found == expected)
    except Exception:  # arrays, which compare element by element
        return bool((found == expected).all())


def _inside(unit: nn.Module, path: str) -> nn.Module:
    """A module inside of a unit, through the wrappers of modules."""
    found = unwrapped(unit)
    for key in path.split(".") if path else ():
        found = unwrapped(found._modules[key])  # pyright: ignore[reportArgumentType]
    return found


_Noted = dict[tuple[str, int], Any]
"""What modules inside of a unit have returned, by their paths and calls."""


def _left_in(unit: Any, call: Call, noted: _Noted, place: Place) -> Any:
    """What a unit has left elsewhere than in its output; None if it is not there."""
    if place.root == "arguments":
        return _at(call, place.path)
    if place.root == "attributes":
        return _at(vars(_inside(unit, place.module)), place.path)
    return _at(noted.get((place.module, place.call)), place.path)


@contextmanager
def _noting(unit: nn.Module, places: Sequence[Place]) -> Iterator[_Noted]:
    """Note the outputs of modules inside of a unit."""
    calls, noted = Counter[str](), _Noted()

    def note(path: str, _: Any, __: Any, output: Any) -> None:
        noted[path, calls[path]] = output
        calls[path] += 1

    with ExitStack() as stack:
        for path in {place.module for place in places}:
            handle = _inside(unit, path).register_forward_hook(partial(note, path))
            stack.callback(handle.remove)
        yield noted


def _not_left(step: Step, place: Place) -> PartitionError:
    name = ".".join(filter(None, (place.module, *(str(key) for _, key in place.path))))
    return PartitionError(
        f"{step.target!r} ({step.line}) has left no new tensor in its {place.root} {name!r} "
        "in this call, as when the forward was recorded; if the forward itself empties it, let "
        "the submodule do so, or return the tensor from it in each call"
    )


KINDS = 256
"""How many kinds of calls are known at a time, and how many of one kind that read other numbers."""


class CutModel:
    """What the stages of a model have in common.

    Args:
        empty: the model without data.
        cuts: the calls of units with which stages begin, from the second on.
        starts: finds the steps with which stages begin, instead of cuts.
    """

    def __init__(
        self,
        empty: EmptyModel,
        cuts: Sequence[Cut],
        starts: Callable[[Record], list[int]] | None = None,
    ) -> None:
        self.empty, self.cuts = empty, tuple(cuts)
        self.arguments = arguments_of_forward(empty.kind)
        self.starts = starts or partial(starts_of, cuts=self.cuts, name=empty.kind.__name__)
        self.homes: dict[str, frozenset[int]] = {}
        """The stages that have each unit, and each parameter that the forward itself uses."""
        self.is_example = False
        """Whether an example has shown the homes."""
        self.first: list[StageProgram] | None = None
        """The programs of all stages for the first call."""
        self.known: Callable[[Any], list[list[StageProgram]]] = lru_cache(KINDS)(lambda kind: [])
        """Those of the calls of a kind, which differ in the numbers that they read."""
        self.lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> CutModel:
        return self

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.cuts) + 1 if self.first is None else len(self.first)

    def learn(self, key: Any, training: bool, record: Callable[[], Record]) -> list[StageProgram]:
        """Record a call of a kind, and cut it."""
        if self.empty.model.training != training:
            self.empty.model.train(training)
        made = record()
        plans = StepPlacement(made, self.starts(made)).plans()
        rests = [*(plan.arguments for plan in plans[1:]), None]
        known = [StageProgram(made, *each) for each in zip(plans, rests, strict=True)]
        if self.first is not None and len(known) != self.stages:
            raise PartitionError(
                f"the forward of {self.empty.kind.__name__} has {len(known) - 1} split "
                f"points in this call, and {self.stages - 1} in the example; let it call "
                "pipe_split() as often, also in evaluation"
            )
        self._require_at_home(known)
        self.first = self.first or known
        alike = self.known(key)
        alike.append(known)
        del alike[:-KINDS]
        return known

    def _require_at_home(self, known: list[StageProgram]) -> None:
        """Raise if a stage uses a unit or a parameter of another stage."""
        for stage, program in enumerate(known):
            for name in program.uses:
                homes = self.homes.get(name, {stage})
                if stage not in homes:
                    does = "calls" if name in program.plan.units else "uses the parameter"
                    advice = "call by_names with example=, the arguments of the model"
                    if self.is_example:
                        advice = "call the model as in the example, or cut it by hand"
                    raise PartitionError(
                        f"the forward {does} {name!r} in stage {stage}, but it is in stage "
                        f"{min(homes)}; {advice}"
                    )


def key_of_kind(kind: Any, training: bool, device: torch.device, types: Types | None) -> Any:
    """A kind of call: its arguments, the modes of torch, and types that have changed."""
    name = device.type
    devices = ("cpu",) if name in ("cpu", "meta") else ("cpu", name)
    autocast = [torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in devices]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return (kind, training, devices, *modes, *autocast, types)


class RecordedStage(nn.Module):
    """A stage: the model's own modules, parameters and buffers under the model's names."""

    def __init__(self, cut: CutModel, stage: int) -> None:
        super().__init__()
        self._cut, self._stage = cut, stage
        self._lead: tuple[str, ...] = ()
        """The path of a parameter, whose type is that of the stage."""
        self._types: dict[Any, Types | None] = {}
        """What has changed since the cut, for each type of that parameter; at first, nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage; returns what the next one needs, or the model's output."""
        received: tuple[Any, ...] = ()
        if self._stage == 0:
            require_no_cache(kwargs)
            call: Call = args, without_cache(self._cut.arguments[len(args) :], kwargs)
        elif len(args) == 3 and isinstance(args[0], tuple):
            # Keywords of a rank reach all its stages; the model's came from the stage before.
            received, call = args[0], (args[1], args[2])
        else:
            raise PartitionError(
                f"stage {self._stage} takes what stage {self._stage - 1} returns, not the "
                "arguments of the model: those go to stage 0"
            )
        program, tensors = self.program(call, received)
        expected = len(program.plan.received)
        if len(received) != expected:
            raise PartitionError(
                f"stage {self._stage} takes {counted(expected, 'tensor')} of stage "
                f"{self._stage - 1}, and got {len(received)}; pass what that stage of the same "
                "model returns"
            )
        return program.call(self, received, call, tensors)

    def program(self, call: Call, received: tuple[Any, ...]) -> tuple[StageProgram, list[Any]]:
        """What to run for a call, and the tensors in its arguments; records a new kind."""
        cut, tensors = self._cut, list[Any]()
        kind, training, types = key_of(call, tensors), self.training, self.types()
        first = next((t for t in (*tensors, *received) if isinstance(t, torch.Tensor)), None)
        device = torch.device("cpu") if first is None else first.device
        key = key_of_kind(kind, training, device, types)
        for each in cut.known(key):
            if each[self._stage].holds(self, tensors, received):
                return each[self._stage], tensors
        with cut.lock:
            made = cut.learn(key, training, lambda: record_twice(cut.empty, call, types, device))
        return made[self._stage], tensors

    def types(self) -> Types | None:
        """How the type of the stage has changed since it was cut: by ``to(…)`` or in FSDP."""
        if not self._lead:
            return None
        *path, key = self._lead
        holder: Any = self
        for each in path:
            holder = holder._modules[each]
        lead = holder._parameters[key]
        seen = lead.dtype, type(lead)
        if seen not in self._types:
            self._types[seen] = self._changed_types(lead.dtype) if self._types else None
        return self._types[seen]

    def _changed_types(self, now: torch.dtype) -> Types | None:
        """The type of the stage when the model was cut, and that of now."""
        before = next(iter(self._types))[0]
        sharded = [part for part in self.modules() if hasattr(part, "_get_fsdp_state")]
        for part in sharded:
            policy: Any = getattr(part._get_fsdp_state(), "_mp_policy", None)  # pyright: ignore
            if (computes_in := getattr(policy, "param_dtype", None)) is not None:
                return Types(before, computes_in, is_sharded=True)
        if sharded or now is before:
            return None
        for name, buffer in self.named_buffers():
            if buffer.dtype is before and name in self._cut.homes:
                raise PartitionError(
                    f"the type of the model has changed since it was cut, from {before}, but not "
                    f"that of the buffer {name!r}, which its stages have; change the type of the "
                    "stages, or before the model is cut"
                )
        return Types(before, now, is_sharded=False)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the units of this stage."""
        for name in self._cut.empty.modules:
            if self._stage in self._cut.homes[name]:
                unit = self.get_submodule(name)
                unit._compiled_call_impl = torch.compile(_call_of(unit), *args, **kwargs)


def _call_of(unit: nn.Module) -> Callable[..., Any]:
    """The call of a module as a function of ours: torch does not compile its own functions."""
    return lambda *args, **kwargs: unit._call_impl(*args, **kwargs)


class Holder(nn.Module):
    """In the place of a module around others that stages have, or of one of another stage."""


def make_stage(model: nn.Module, cut: CutModel, stage: int) -> RecordedStage:
    """The module of a stage, with the modules and tensors of the model that it has."""
    made = RecordedStage(cut, stage)
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
    made._lead = tuple(filter(None, next(floats, "").split(".")))
    made.types()
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
    programs = _programs_of(stage_module)
    sent = programs[vars(stage_module)["_stage"]].plan.sent if programs else ()
    return [value.name for value in sent]


def has_dynamic_shapes(stage_module: nn.Module) -> bool:
    """Whether the shapes of tensors between stages depend on data, as far as a call has shown."""
    programs = _programs_of(stage_module)
    return any(not program.record.sized.isdisjoint(program.plan.sent) for program in programs)


def _programs_of(stage_module: nn.Module) -> list[StageProgram]:
    """Those of the first call."""
    return (isinstance(stage_module, RecordedStage) and stage_module._cut.first) or []


def model_of(stage_module: nn.Module) -> nn.Module | None:
    """The whole model without data, if a module is a stage of one that was cut by names."""
    return stage_module._cut.empty.model if isinstance(stage_module, RecordedStage) else None
