"""Runs the steps of a stage: what is known before a call is prepared, as a list of functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import combinations, groupby
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from taktline.errors import PartitionError
from taktline.split.arguments import Call
from taktline.split.cut import StagePlan
from taktline.split.nested import Absent, Path, State, Value, at_path, filled, parts_in, walk
from taktline.split.steps import CheckpointRegion, Extra, Modes, Record, Step, StepKind
from taktline.split.without_data import has_data
from taktline.stage.names import unwrapped


class Differs(Exception):
    """A number that the forward reads from its arguments is not the one that was recorded."""


class OtherTypes(Exception):
    """A unit returns another type than in the record, as one in FSDP does: both types."""


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
        self.is_checked = False
        """Whether a call has shown that units return the types of the record."""
        self._is_last = rest is None
        self._given = parts_in(record.given, Value)
        given = list(enumerate(self._given))
        self._taken = [(v, at) for at, v in given if v in plan.arguments or v in plan.first]
        self._dropped = [(at, Absent(*record.metas[v])) for at, v in given if v not in (rest or ())]
        written = {memory for step in record.steps for memory in step.writes}
        self._changed = [at for at, value in given if record.memory[value] in written]
        self._result_states = parts_in(record.result, State)
        result = parts_in(record.result, Value) if self._is_last else ()
        self._runs = self._prepared(plan.steps, {*plan.sent, *result})
        self._guards = self._prepared(plan.guards, set(record.metas))  # which lets go of nothing

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
        """Run the stage; the first time, compare types."""
        if self._changed:
            self._require_own_memory(tensors)
        values = self._run(self._runs, stage, received, tensors)
        self.is_checked = True
        if self._is_last:
            self._find_states(self._result_states, values, stage)
            return filled(self.record.result, values)
        sent = tuple([values[value] for value in self.plan.sent])
        if any(type(tensors[at]) is not Absent for at, _ in self._dropped):
            for at, absent in self._dropped:
                tensors[at] = absent
            call = filled(self.record.given, dict(zip(self._given, tensors, strict=True)))
        return (sent, *call)

    def _require_own_memory(self, tensors: list[Any]) -> None:
        """Raise if an argument that is changed in place is in the memory of another one."""
        for one, other in combinations(range(len(tensors)), 2):
            is_changed = one in self._changed or other in self._changed
            if is_changed and _memory_of(tensors[one]) & _memory_of(tensors[other]):
                raise PartitionError(
                    "the forward changes an argument of the model in place, but arguments "
                    f"{one} and {other} are the same tensor, or views of one; pass a copy "
                    "(x.clone())"
                )

    def _run(self, runs: list[Run], stage: nn.Module, received: Any, tensors: list[Any]) -> Values:
        values = dict(zip(self.plan.received, received, strict=False))
        for value, at in self._taken:
            values[value] = tensors[at]
        if not self.is_checked:
            self._check(self.plan.received, values)
        for value in self.plan.copied:
            if value in values:
                values[value] = values[value].clone()
        for run in runs:
            run(values, stage)
        return values

    def _find_states(self, states: Sequence[State], values: Values, stage: nn.Module) -> None:
        """Find parameters and buffers; a tied one has one of its names in this stage."""
        for state in states:
            for name in self.record.aliases[state.name]:
                path, _, last = name.rpartition(".")
                with suppress(AttributeError):
                    values[state] = getattr(stage.get_submodule(path), last)

    def _check(self, made: Sequence[Value], values: Values) -> None:
        """Raise if values have other types than in the record."""
        for value in made:
            dtype = self.record.metas[value][1]
            found = getattr(values.get(value), "dtype", dtype)
            if dtype.is_floating_point and found is not dtype:
                raise OtherTypes(dtype, found)

    def _prepared(self, steps: Sequence[Step], later: set[Value], depth: int = 0) -> list[Run]:
        """Functions that run steps; ``later`` are the values that are used after them."""
        found: list[Run] = []

        def group_of(step: Step) -> tuple[tuple[CheckpointRegion, ...], Modes | None]:
            region = step.region[depth : depth + 1]
            return region, None if region else step.modes

        later = set(later)
        for (region, modes), group in reversed([(k, list(g)) for k, g in groupby(steps, group_of)]):
            if modes is None:
                found.append(self._checkpointed(region[0], group, later, depth + 1))
                later.update(value for step in group for value in step.reads)
                continue
            runs = self._in_one_mode(group, later)
            outer = self.record.modes
            found += runs[::-1] if modes == outer else [partial(_run_in, modes, outer, runs)]
        return found[::-1]

    def _in_one_mode(self, steps: Sequence[Step], later: set[Value]) -> list[Run]:
        """Functions that run steps; adds what they need to what is used later."""
        found: list[Run] = []
        chain: list[tuple[Step, Run]] = []

        def close() -> None:
            chained = chain[::-1]
            if len(chained) > 1:
                found.append(self._chain(*map(list, zip(*chained, strict=True))))
            else:
                found.extend(run for _, run in chained)
            chain.clear()

        for step in reversed(steps):
            is_link = _is_link(step, later)
            if not is_link or (chain and step.output != chain[-1][0].args[0]):
                close()
            run = self._step(step, later)
            if is_link:
                chain.append((step, run))
            else:
                found.append(run)
            later.update(step.reads)
        close()
        return found[::-1]

    def _checkpointed(
        self, region: CheckpointRegion, steps: Sequence[Step], later: set[Value], depth: int
    ) -> Run:
        """A function that runs the steps of a checkpointed part."""
        made = {value: None for step in steps for value in step.makes}
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

    def _step(self, step: Step, later: set[Value]) -> Run:
        """A function that runs one step, and lets go of values that are not used later."""
        function, given, expected = step.target, (step.args, step.kwargs), step.output
        is_unit, is_read = step.kind is StepKind.UNIT, step.kind is StepKind.READ
        is_guard = is_read and step in self.plan.guards
        keys, states = function.split(".") if is_unit else (), step.states
        places, constants = ([], []) if is_read else _places(expected)
        done = [value for value in {*step.reads, *step.makes} if value not in later]
        noted = [extra for extra in step.extras if extra.call is not None]
        left = [extra for extra in step.extras if extra.call is None]

        def run(values: Values, stage: nn.Module) -> None:
            target: Any = stage if is_unit else function
            for key in keys:
                target = target._modules[key]
            if states:
                self._find_states(states, values, stage)
            args, kwargs = filled(given, values)
            before = [_attribute(target, extra) for extra in left]
            if noted:
                with _noting(target, step, noted, values):
                    output = target(*args, **kwargs)
            else:
                output = target(*args, **kwargs)
            if is_read and not _same(output, expected):
                raise Differs if is_guard else _differs(step, output)
            if is_unit and constants:
                _require_constants(step, output, constants)
            for value, path in places:
                values[value] = at_path(output, path)
            for extra, old in zip(left, before, strict=True):
                is_given = extra.module is None
                new = at_path((args, kwargs), extra.path) if is_given else _attribute(target, extra)
                if new is None or new is old:
                    raise _kept(step, extra)
                values[extra.value] = new
            if is_unit and not self.is_checked:
                self._check(step.makes, values)
            for value in done:
                values.pop(value, None)

        return run

    def _chain(self, steps: Sequence[Step], runs: Sequence[Run]) -> Run:
        """A function that runs layers, each on the output of the one before, in less time."""
        paths = [step.target.split(".") for step in steps]
        (first,), last = steps[0].args, steps[-1].output

        def run_chain(values: Values, stage: nn.Module) -> None:
            if not self.is_checked:
                for run in runs:
                    run(values, stage)
                return
            x = values.pop(first)
            for path in paths:
                target: Any = stage
                for key in path:
                    target = target._modules[key]
                x = target(x)
            values[last] = x

        return run_chain


def _is_link(step: Step, later: set[Value]) -> bool:
    """Whether a step is a layer with one argument and one output, which is all that is left."""
    args, output = step.args, step.output
    return (
        step.kind is StepKind.UNIT
        and len(args) == 1
        and type(args[0]) is type(output) is Value
        and args[0] not in later
        and not (step.kwargs or step.extras)
        and output != args[0]
    )


def _places(template: Any) -> tuple[list[tuple[Value, Path]], list[tuple[Path, Any]]]:
    """Where an output has values, and where numbers, texts, None, and so many parts."""
    marks = {value: torch.empty(0) for value in parts_in(template, Value)}
    marks |= {state: torch.empty(0) for state in parts_in(template, State)}
    values = {id(mark): value for value, mark in marks.items() if type(value) is Value}
    places: dict[Value, Path] = {}
    constants: list[tuple[Path, Any]] = []
    for path, part in walk(filled(template, marks)):
        if id(part) in values:
            places.setdefault(values[id(part)], path)
        elif part is None or isinstance(part, (bool, int, float, str)):
            constants.append((path, part))
    return list(places.items()), constants


def _require_constants(step: Step, output: Any, constants: Sequence[tuple[Path, Any]]) -> None:
    """Raise if a unit returns other numbers than in the record, on which the forward may depend."""
    for path, expected in constants:
        try:
            found = at_path(output, path)
        except (LookupError, AttributeError, TypeError):
            found = ...
        if found is not expected and (type(found) is not type(expected) or found != expected):
            raise PartitionError(
                f"{step.target!r} ({step.line}) returns {_described(found)} where it has returned "
                f"{expected!r} when the forward was recorded, which may depend on that; return a "
                "tensor, or nothing"
            )


def _described(found: Any) -> str:
    return repr(found) if isinstance(found, (bool, int, float, str)) else type(found).__name__


def _memory_of(tensor: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata} if isinstance(tensor, torch.Tensor) else set()


def _run_in(
    modes: Modes, outer: Modes, runs: Sequence[Run], values: Values, stage: nn.Module
) -> None:
    """Run steps in other modes of torch than the forward was called in."""
    with modes.instead_of(outer):
        for run in runs:
            run(values, stage)


def _differs(step: Step, found: Any) -> PartitionError:
    return PartitionError(
        f"{step.line} reads {found!r}, where it has read {step.output!r} before: what the forward "
        "does depends on a random number, or on a buffer that changes, which stages cannot decide "
        "by themselves; turn that off (a layerdrop of 0), or move it into a submodule"
    )


def _same(found: Any, expected: Any) -> bool:
    try:
        return bool(found == expected)
    except Exception:  # arrays, which compare element by element
        return bool((found == expected).all())


def _attribute(unit: Any, extra: Extra) -> Any:
    """What an attribute in a unit is now; None for arguments, and if it is not there."""
    try:
        return None if extra.module is None else at_path(_inside(unit, extra.module), extra.path)
    except (LookupError, AttributeError):
        return None


def _kept(step: Step, extra: Extra) -> PartitionError:
    name = ".".join(str(key) for _, key in extra.path)
    return PartitionError(
        f"{step.target!r} ({step.line}) has not set {name!r} in this call, but when the forward "
        "was recorded; if the forward itself empties it, let the submodule do so, or return the "
        "tensor from it"
    )


def _inside(unit: nn.Module, path: str) -> nn.Module:
    """A module inside of a unit, through the wrappers of modules."""
    found = unwrapped(unit)
    for key in path.split(".") if path else ():
        found = unwrapped(found._modules[key])  # pyright: ignore[reportArgumentType]
    return found


@contextmanager
def _noting(unit: nn.Module, step: Step, extras: Sequence[Extra], values: Values) -> Iterator[None]:
    """Note outputs of modules inside of a unit, as values."""
    calls: Counter[str] = Counter()

    def note(path: str, _: Any, __: Any, output: Any) -> None:
        for extra in extras:
            if (extra.module, extra.call) == (path, calls[path]):
                values[extra.value] = at_path(output, extra.path)
        calls[path] += 1

    with ExitStack() as stack:
        for path in {extra.module or "" for extra in extras}:
            handle = _inside(unit, path).register_forward_hook(partial(note, path))
            stack.callback(handle.remove)
        yield
    for extra in extras:
        if extra.value not in values:
            raise PartitionError(
                f"{step.line} uses the output of {extra.module!r} in {step.target!r}, which was "
                "not called this time, but when the forward was recorded; return it from "
                f"{step.target!r} in each call"
            )
