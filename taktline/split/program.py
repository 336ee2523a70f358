"""Runs the steps of a stage: what is known before a call is prepared, as a list of functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from taktline.errors import PartitionError
from taktline.split.arguments import Call
from taktline.split.cut import StagePlan
from taktline.split.kinds import Absent
from taktline.split.nested import Node, Object, Path, at_path, parts_in, walk
from taktline.split.steps import Extra, Kind, Modes, Record, Region, State, Step, Value
from taktline.split.without_data import has_data
from taktline.stage.names import unwrapped


class Differs(Exception):
    """A number that the forward reads from its arguments is not the one that was recorded."""


class OtherTypes(Exception):
    """A unit returns another type than in the record, as one in FSDP does: both types."""


class Values(dict[Any, Any]):
    """The values of a call; also knows the parameters and buffers of the stage."""

    record: Record
    stage: nn.Module

    def __missing__(self, key: Any) -> torch.Tensor:
        record = self.record
        if type(key) is Value:
            raise PartitionError(
                f"{record.names[key]} was not made in this call, but in the one that was recorded; "
                "return it from its submodule in each call"
            )
        for name in record.aliases[key.name]:
            path, _, last = name.rpartition(".")
            try:
                return getattr(self.stage.get_submodule(path), last)
            except AttributeError:
                continue  # a tied weight, which this stage has under another name
        raise PartitionError(
            f"the forward uses {key.name!r}, which is in another stage; call by_names with "
            "example=, the arguments of the model"
        )


Run = Callable[[Values], None]


class Program:
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
        values = self._run(self._runs, stage, received, tensors)
        self.is_checked = True
        if self._is_last:
            return filled(self.record.result, values)
        sent = tuple([values[value] for value in self.plan.sent])
        if any(type(tensors[at]) is not Absent for at, _ in self._dropped):
            for at, absent in self._dropped:
                tensors[at] = absent
            call = filled(self.record.given, dict(zip(self._given, tensors, strict=True)))
        return (sent, *call)

    def _run(self, runs: list[Run], stage: nn.Module, received: Any, tensors: list[Any]) -> Values:
        values = Values(zip(self.plan.received, received, strict=False))
        values.record, values.stage = self.record, stage
        for value, at in self._taken:
            values[value] = tensors[at]
        if not self.is_checked:
            self._check(self.plan.received, values)
        for value in self.plan.copied:
            if value in values:
                values[value] = values[value].clone()
        for run in runs:
            run(values)
        return values

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

        def group_of(step: Step) -> tuple[tuple[Region, ...], Modes | None]:
            region = step.region[depth : depth + 1]
            return region, None if region else step.modes

        later = set(later)
        for (region, modes), group in reversed([(k, list(g)) for k, g in groupby(steps, group_of)]):
            if modes is None:
                found.append(self._checkpointed(region[0], group, later, depth + 1))
                later.update(value for step in group for value in step.reads)
                continue
            runs: list[Run] = []
            for step in reversed(group):
                runs.append(self._step(step, later))
                later.update(step.reads)
            outer = self.record.modes
            found += runs if modes == outer else [partial(_run_in, modes, outer, runs[::-1])]
        return found[::-1]

    def _checkpointed(
        self, region: Region, steps: Sequence[Step], later: set[Value], depth: int
    ) -> Run:
        """A function that runs the steps of a checkpointed part."""
        made = {value: None for step in steps for value in step.makes}
        needs = {value: None for step in steps for value in step.reads if value not in made}
        returned = [value for value in made if value in later]
        done = [value for value in needs if value not in later]
        runs = self._prepared(steps, later, depth)

        def inside(stage: nn.Module, *given: Any) -> tuple[Any, ...]:
            values = Values(zip(needs, given, strict=True))
            values.record, values.stage = self.record, stage
            for run in runs:
                run(values)
            return tuple([values[value] for value in returned])

        def run_region(values: Values) -> None:
            found = checkpoint(
                inside, values.stage, *[values[value] for value in needs],
                use_reentrant=False, preserve_rng_state=region.preserves_rng,
            )  # fmt: skip
            values.update(zip(returned, found, strict=True))
            for value in done:
                del values[value]

        return run_region

    def _step(self, step: Step, later: set[Value]) -> Run:
        """A function that runs one step, and lets go of values that are not used later."""
        function, args, kwargs, expected = step.target, step.args, step.kwargs, step.output
        is_unit, is_read = step.kind is Kind.UNIT, step.kind is Kind.READ
        is_guard = is_read and step in self.plan.guards
        keys = function.split(".") if is_unit else ()
        places = () if is_read else _places(expected)
        done = [value for value in {*step.reads, *step.makes} if value not in later]
        inside = [extra for extra in step.extras if extra.where == "inside"]
        left = [extra for extra in step.extras if extra.where != "inside"]

        def run(values: Values) -> None:
            target: Any = values.stage if is_unit else function
            for key in keys:
                target = target._modules[key]
            given = filled(args, values), filled(kwargs, values)
            if inside:
                with _noting(target, inside, values):
                    output = target(*given[0], **given[1])
            else:
                output = target(*given[0], **given[1])
            if is_read and not _same(output, expected):
                raise Differs if is_guard else _differs(step, output)
            for value, path in places:
                values[value] = at_path(output, path)
            for extra in left:
                source = given if extra.where == "arguments" else _inside(target, extra.module)
                values[extra.value] = at_path(source, extra.path)
            if is_unit and not self.is_checked:
                self._check(step.makes, values)
            for value in done:
                values.pop(value, None)

        def run_next(values: Values) -> None:
            """The same for a layer in a chain, of which there are many, in less time."""
            if not self.is_checked:
                return run(values)
            target: Any = values.stage
            for key in keys:
                target = target._modules[key]
            values[expected] = target(values.pop(args[0]))

        is_next = len(args) == 1 and type(args[0]) is type(expected) is Value and done == [*args]
        return run_next if is_unit and is_next and not (kwargs or step.extras) else run


def filled(template: Any, values: dict[Any, Any]) -> Any:
    """The nested value that a template describes."""
    kind = type(template)
    if kind is Value or kind is State:
        return values[template]
    if kind is tuple or kind is list:
        return kind([filled(part, values) for part in template])
    if kind is dict:
        return {key: filled(part, values) for key, part in template.items()}
    if kind is slice:
        return slice(*filled((template.start, template.stop, template.step), values))
    if kind is Object:
        return Object(template.kind, filled(template.attributes, values)).build()
    if kind is Node:
        return Node(template.spec, filled(template.parts, values)).build()
    return template


def _places(template: Any) -> list[tuple[Value, Path]]:
    """The values of an output with their paths in it."""
    marks: dict[Any, Any] = defaultdict(object)
    leaves = list(walk(filled(template, marks)))
    return [
        (value, path)
        for value, mark in marks.items()
        if type(value) is Value
        for path, leaf in leaves
        if leaf is mark
    ]


def _run_in(modes: Modes, outer: Modes, runs: Sequence[Run], values: Values) -> None:
    """Run steps in other modes of torch than the forward was called in."""
    with ExitStack() as stack:
        if modes.grad != outer.grad:
            stack.enter_context(torch.set_grad_enabled(modes.grad))
        for (device, dtype), (_, before) in zip(modes.autocast, outer.autocast, strict=True):
            if dtype != before:
                stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
        for run in runs:
            run(values)


def _differs(step: Step, found: Any) -> PartitionError:
    return PartitionError(
        f"{step.line} reads {found!r}, where it has read {step.output!r} before: what the forward "
        "does depends on a random number, which stages cannot decide by themselves; turn that off "
        "(a layerdrop of 0), or move it into a submodule"
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


@contextmanager
def _noting(unit: nn.Module, extras: Sequence[Extra], values: Values) -> Iterator[None]:
    """Note outputs of modules inside of a unit, as values."""
    calls: Counter[str] = Counter()

    def note(path: str, _: Any, __: Any, output: Any) -> None:
        for extra in extras:
            if (extra.module, extra.call) == (path, calls[path]):
                values[extra.value] = at_path(output, extra.path)
        calls[path] += 1

    with ExitStack() as stack:
        for path in {extra.module for extra in extras}:
            handle = _inside(unit, path).register_forward_hook(partial(note, path))
            stack.callback(handle.remove)
        yield
