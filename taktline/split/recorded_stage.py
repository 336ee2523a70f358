"""A stage of a model that was cut by names: a module that runs its steps of the recorded forward.

The first call of a kind (shapes, types, constants, modes) records the forward; each later one looks
up what that has shown, and runs the steps of the stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from taktline.errors import PartitionError
from taktline.split.cut import StagePlan, StepPlacement, record_twice, starts_of
from taktline.split.steps import (
    Absent,
    Call,
    Cut,
    Modes,
    Path,
    Record,
    State,
    Step,
    Value,
    arguments_of_forward,
    at_path,
    filled,
    key_of,
    parts_in,
    without_cache,
)
from taktline.split.without_data import EmptyModel, NeedsData, has_data
from taktline.stage.kinds import CompiledCall, CompiledChain
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
        self._runs = self._prepared(plan.steps, {*plan.sent, *result})
        self._guards = self._prepared(plan.guards, set(record.values))  # lets go of nothing

    @property
    def uses(self) -> dict[str, None]:
        """The units, and the parameters and buffers, that the stage itself uses."""
        used = [s for step in (*self.plan.guards, *self.plan.steps) for s in step.states]
        return self.plan.units | {state.name: None for state in (*used, *self._result_states)}

    def holds(self, stage: nn.Module, tensors: list[Any], received: tuple[Any, ...]) -> bool:
        """Whether the forward reads the same numbers from these arguments."""
        try:
            if self.plan.guards:
                self._run(self._guards, stage, (), tensors)
        except (Differs, NeedsData):
            return not has_data([*tensors, *received])  # as in a run that only counts
        return True

    def call(
        self, stage: nn.Module, received: tuple[Any, ...], call: Call, tensors: list[Any]
    ) -> Any:
        """Run the stage."""
        for at in self._changed:
            memory = [t.untyped_storage()._cdata for t in tensors if isinstance(t, torch.Tensor)]
            if len(set(memory)) < len(memory):
                raise PartitionError(
                    f"the forward changes argument {at} of the model in place, but two arguments "
                    "are one tensor, or views of it; pass a copy (x.clone())"
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

        def group_of(step: Step) -> tuple[tuple[int, ...], Modes | None]:
            region = step.region[depth : depth + 1]
            return region, None if region else step.modes

        for (_, modes), group in reversed([(k, list(g)) for k, g in groupby(steps, group_of)]):
            if modes is None:
                found.append(self._checkpointed(group, later, depth + 1))
                later.update(value for step in group for value in step.reads)
                continue
            runs = list[Run]()
            for chain in reversed(_chains(group, later)):
                is_layer = _is_layer(chain[0])
                make = self._layers(chain, later) if is_layer else self._step(chain[0], later)
                runs.append(make)
                later.update(value for step in chain for value in step.reads)
            found += runs if modes == outer else [partial(_run_in, modes, outer, runs[::-1])]
        return found[::-1]

    def _checkpointed(self, steps: Sequence[Step], later: set[Value], depth: int) -> Run:
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
            given = [values[value] for value in needs]
            found = checkpoint(inside, stage, *given, use_reentrant=False)
            values.update(zip(returned, found, strict=True))
            for value in done:
                del values[value]

        return run_region

    def _layers(self, chain: Sequence[Step], later: set[Value]) -> Run:
        """A function that runs layers one after the other, in less time than steps."""
        (given, *rest), kwargs, names = chain[0].args, chain[0].kwargs, [x.target for x in chain]
        keys, (output,) = [name.split(".") for name in names], chain[-1].places
        is_done, has_rest = given not in later, bool(rest or kwargs)
        done = {value for value in parts_in((rest, kwargs), Value) if value not in later}

        def run(values: Values, stage: nn.Module) -> None:
            x, more, options = values.pop(given) if is_done else values[given], (), kwargs
            if has_rest:
                more, options = filled((rest, kwargs), values)
            layers = list[Any]()
            for path in keys:
                layer: Any = stage
                for key in path:
                    layer = layer._modules[key]
                layers.append(layer)
            if len(layers) > 1 and isinstance(stage, RecordedStage):
                layers = stage.compiled(layers, names)
            for layer in layers:
                x = layer(x, *more, **options)
            values[output] = x
            for value in done:
                values.pop(value, None)

        return run

    def _step(self, step: Step, later: set[Value]) -> Run:
        """A function that runs one step, and lets go of values that are not used later."""
        function, given, states = step.target, (step.args, step.kwargs), step.states
        is_unit, is_read = step.kind == "unit", step.kind == "read"
        keys = function.split(".") if is_unit else ()
        outputs = [(v, path[1:]) for v, path in step.places.items() if path[0][1] == "output"]
        left = [(v, path) for v, path in step.places.items() if path[0][1] != "output"]
        done = [value for value in {*step.reads, *step.places} if value not in later]

        def run(values: Values, stage: nn.Module) -> None:
            target: Any = stage if is_unit else function
            for key in keys:
                target = target._modules[key]
            if states:
                self._find_states(states, values, stage)
            args, kwargs = call = filled(given, values)
            if left:
                output = _run_unit(step, target, call, left, values)
            else:
                output = target(*args, **kwargs)
            if is_read and not _same(output, step.found):
                raise Differs if step.is_guard else step.differs(output)
            if is_unit and step.constants:
                _require_constants(step, output)
            for value, path in outputs:
                values[value] = at_path(output, path)
            if step.is_made_up and any(values[v].shape != v.absent.shape for v in step.places):
                raise PartitionError(
                    f"{step.target!r} ({step.line}) returns another size than when the forward was "
                    "recorded, which depends on its data; return all, and mark what does not count"
                )
            for value in done:
                values.pop(value, None)

        return run


def _is_layer(step: Step) -> bool:
    """Whether a step is a layer: a unit that takes a value, and perhaps others, and returns one."""
    return (
        step.kind == "unit"
        and bool(step.args)
        and type(step.args[0]) is Value
        and list(step.places.values()) == [((False, "output"),)]
        and not (step.is_made_up or step.constants or step.states)
    )


def _chains(steps: Sequence[Step], later: set[Value]) -> list[list[Step]]:
    """The steps, with layers together that only hand on a value, and get the same otherwise."""
    found = list[list[Step]]()
    uses = Counter(value for step in steps for value in step.reads)
    for step in steps:
        before = found[-1][-1] if found else None
        if before is not None and _is_layer(before) and _is_layer(step):
            (value,) = before.places
            same = (before.args[1:], before.kwargs) == (step.args[1:], step.kwargs)
            if same and step.args[0] is value and uses[value] == 1 and value not in later:
                found[-1].append(step)
                continue
        found.append([step])
    return found


def _require_constants(step: Step, output: Any) -> None:
    """Raise if a unit returns other numbers than in the record, on which the forward may depend."""
    for path, expected in step.constants:
        found = _at({"output": output}, path)
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


def _run_in(
    modes: Modes, outer: Modes, runs: Sequence[Run], values: Values, stage: nn.Module
) -> None:
    """Run steps in other modes of torch than the forward was called in."""
    with modes.instead_of(outer):
        for run in runs:
            run(values, stage)


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


def _run_unit(
    step: Step, unit: nn.Module, call: Call, left: Sequence[tuple[Value, Path]], values: Values
) -> Any:
    """Run a unit that leaves tensors elsewhere than in its output; these are put among the values.

    They are in its arguments, in attributes of modules, or in what modules inside of it return.
    """
    calls, noted = Counter[str](), dict[tuple[str, int], Any]()

    def note(path: str, _: Any, __: Any, output: Any) -> None:
        noted[path, calls[path]] = output
        calls[path] += 1

    inner = {path[1][1][0] for _, path in left if path[0][1] == "inner outputs"}
    within = {path[1][1] for _, path in left if path[0][1] == "attributes"}
    attributes = {path: vars(_inside(unit, path)) for path in within}
    roots = {"arguments": call, "attributes": attributes, "inner outputs": noted}
    before = [_at(roots, path) for _, path in left]
    with ExitStack() as stack:
        for path in inner:
            handle = _inside(unit, path).register_forward_hook(partial(note, path))
            stack.callback(handle.remove)
        output = unit(*call[0], **call[1])
    for (value, path), old in zip(left, before, strict=True):
        values[value] = _at(roots, path)
        if values[value] is None or values[value] is old:
            (_, root), (_, where), *rest = path
            name = ".".join(filter(None, map(str, (where, *(key for _, key in rest)))))
            raise PartitionError(
                f"{step.target!r} ({step.line}) has left no new tensor in its {root} {name!r} "
                "in this call, as when the forward was recorded; if the forward itself empties it, "
                "let the submodule do so, or return the tensor from it in each call"
            )
    return output


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
        names_of = {state.name: state.names for state in known[0].record.states}
        for stage, program in enumerate(known):
            for name in program.uses:
                homes = {at for n in names_of.get(name, (name,)) for at in self._homes_of(n)}
                homes = homes or {stage}
                if stage not in homes:
                    does = "calls" if name in program.plan.units else "uses the parameter"
                    advice = "pass example=, the arguments of the model"
                    if self.is_example:
                        advice = "call the model as in the example, or cut it by hand"
                    raise PartitionError(
                        f"the forward {does} {name!r} in stage {stage}, but it is in stage "
                        f"{min(homes)}; {advice}"
                    )

    def _homes_of(self, name: str) -> frozenset[int]:
        """The stages that have a unit, or a parameter or buffer; none before they are known."""
        unit = next((unit for unit in self.homes if name.startswith(f"{unit}.")), name)
        return self.homes.get(name) or self.homes.get(unit, frozenset())


def key_of_kind(kind: Any, training: bool, device: torch.device, fsdp: torch.dtype | None) -> Any:
    """A kind of call: its arguments, the modes of torch, and the type in which FSDP computes."""
    name = device.type
    devices = ("cpu",) if name in ("cpu", "meta") else ("cpu", name)
    autocast = [torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in devices]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return (kind, training, devices, *modes, *autocast, fsdp)


class RecordedStage(nn.Module):
    """A stage: the model's own modules, parameters and buffers under the model's names."""

    def __init__(self, cut: CutModel, stage: int) -> None:
        super().__init__()
        self._cut, self._stage = cut, stage
        self._lead: tuple[dict[str, Any], str, torch.dtype] | None = None
        """A parameter: the table that it is in, its name there, and its type at the cut."""
        self._chains: dict[str, CompiledChain] | None = None
        """If its units are compiled: those that are called together, by the first one's name."""
        self._seen: tuple[type, torch.dtype] | None = None
        self._computes_in: torch.dtype | None = None
        """The type in which FSDP computes, for a lead of the kind that was seen."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage; returns what the next one needs, or the model's output."""
        received: tuple[Any, ...] = ()
        if self._stage == 0:
            if kwargs.get("use_cache"):
                raise PartitionError(
                    "use_cache needs the keys and values of the layers of all stages, but each "
                    "stage has only its own; leave it out"
                )
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
        kind, training, fsdp = key_of(call, tensors), self.training, self._type_of_fsdp()
        first = next((t for t in (*tensors, *received) if isinstance(t, torch.Tensor)), None)
        device = torch.device("cpu") if first is None else first.device
        key = key_of_kind(kind, training, device, fsdp)
        for each in cut.known(key):
            if each[self._stage].holds(self, tensors, received):
                return each[self._stage], tensors
        made = cut.learn(key, training, lambda: record_twice(cut.empty, call, fsdp, device))
        return made[self._stage], tensors

    def _type_of_fsdp(self) -> torch.dtype | None:
        """The type in which FSDP's mixed precision computes; raises if another has changed it."""
        if self._lead is None:
            return None
        table, key, dtype = self._lead
        seen = type(table[key]), table[key].dtype
        if seen != self._seen:
            sharded = [part for part in self.modules() if hasattr(part, "_get_fsdp_state")]
            if not sharded and seen[1] is not dtype:
                raise PartitionError(
                    f"the type of stage {self._stage} has changed from {dtype} to {seen[1]}; "
                    "change the type before the model is cut"
                )
            policies = [getattr(p._get_fsdp_state(), "_mp_policy", None) for p in sharded]  # pyright: ignore
            types = [getattr(policy, "param_dtype", None) for policy in policies]
            self._seen, self._computes_in = seen, next(filter(None, types), None)
        return self._computes_in

    def compile(self, **options: Any) -> None:
        """Compile the units of this stage; what is between them runs eagerly."""
        for name in units_of(self) or ():
            unit: Any = self.get_submodule(name)
            unit._compiled_call_impl = CompiledCall(unit, f"stage {self._stage}, {name}", **options)
        self._chains = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_chains": None}  # a copy is not compiled, nor its units

    def compiled(self, layers: list[Any], names: Sequence[str]) -> list[Any]:
        """These layers, or what calls several of them at once, if they are compiled."""
        if self._chains is None:
            return layers
        known = self._chains.get(names[0])
        if known is None or known.units != layers:
            known = self._chains[names[0]] = CompiledChain(layers, names, f"stage {self._stage}")
        return [known]


def crossings_of(stage_module: nn.Module) -> list[str]:
    """Names of the tensors that a stage hands to the next one besides the model's arguments."""
    known = isinstance(stage_module, RecordedStage) and stage_module._cut.first
    plan = known[vars(stage_module)["_stage"]].plan if known else None
    return [value.name for value in plan.sent] if plan else []


def units_of(stage_module: nn.Module) -> list[str] | None:
    """Names of the submodules that a stage calls; None if it was not cut by names."""
    if not isinstance(stage_module, RecordedStage):
        return None
    cut, stage = stage_module._cut, vars(stage_module)["_stage"]
    return [name for name in cut.empty.modules if stage in cut.homes[name]]


def model_of(stage_module: nn.Module) -> nn.Module | None:
    """The whole model without data, if a module is a stage of one that was cut by names."""
    return stage_module._cut.empty.model if isinstance(stage_module, RecordedStage) else None
