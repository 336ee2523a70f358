"""Cuts a recorded forward: which steps each stage runs, and which values cross.

What depends on the arguments of the model alone is *free*: each stage that needs it computes it by
itself. Everything else runs once, on the stage in which the forward has got to it::

    steps      mask = …   x = embed(…)   x = layers.0(x, mask)  ║  x = layers.1(x, mask)   norm(x)
               free       stage 0        stage 0                ║  stage 1                 stage 1
    stage 1 computes mask again, and x crosses
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from taktline.errors import PartitionError
from taktline.split.nested import parts_in
from taktline.split.steps import Cut, Kind, Record, State, Step, Value


@dataclass(eq=False)
class StagePlan:
    """What one stage does."""

    steps: list[Step]
    received: tuple[Value, ...] = ()
    """The values that come from the stage before."""
    sent: tuple[Value, ...] = ()
    """The values that go to the next stage."""
    arguments: frozenset[Value] = frozenset()
    """The arguments of the model that this stage or a later one needs."""
    copied: frozenset[Value] = frozenset()
    """The arguments and received values that the stage changes in place."""
    first: frozenset[Value] = frozenset()
    """Of the first stage: all arguments that it needs."""
    guards: list[Step] = field(default_factory=list)
    """The reads of arguments that must be as they were recorded, and what they need."""

    @property
    def units(self) -> dict[str, None]:
        """The units that the stage calls."""
        return {step.target: None for step in self.steps if step.kind is Kind.UNIT}

    def states(self, record: Record, *, is_last: bool) -> dict[str, None]:
        """The parameters and buffers that the stage itself uses."""
        found = {s.name: None for step in (*self.guards, *self.steps) for s in step.states}
        if is_last:
            found |= {state.name: None for state in parts_in(record.result, State)}
        return found


class Placement:
    """The stages of the steps of a record.

    Args:
        record: the forward.
        cuts: the calls of units with which stages begin, from the second on.
        name: what the model is called in errors.
    """

    def __init__(self, record: Record, cuts: Sequence[Cut], name: str) -> None:
        self.record = record
        self.stages = len(cuts) + 1
        self.at = _stages_of(record, cuts, name)
        self.given = set(parts_in(record.given, Value))
        self.homes: dict[Value, int] = dict.fromkeys(self.given, 0)
        self.is_free = self._find_free()
        for step, stage in zip(record.steps, self.at, strict=True):
            for value in step.makes:
                self.homes.setdefault(value, stage)
        self._require_one_stage_for_changes()

    def _find_free(self) -> list[bool]:
        """Whether each step depends on the arguments alone."""
        record, pinned = self.record, set[int]()
        parameters = record.is_parameter
        written = {memory for step in record.steps for memory in step.writes}
        changed = {n for n, memory in record.state_memory.items() if memory in written}
        while True:
            before = len(pinned)
            bound: set[Value] = {v for v in self.given if record.memory[v] in pinned}
            known: set[Value] = self.given - bound
            found: list[bool] = []
            for step in record.steps:
                makes = [value for value in step.makes if value not in known]
                free = (
                    step.kind is not Kind.UNIT
                    and not step.draws
                    and not any(value in bound for value in step.reads)
                    and not any(s.name in parameters or s.name in changed for s in step.states)
                    and not any(record.memory[value] in pinned for value in makes)
                )
                found.append(free)
                (known if free else bound).update(makes)
                if not free and step.kind is not Kind.READ:
                    pinned |= step.writes
                    bound |= {v for v in (*known, *bound) if record.memory[v] in step.writes}
            self.bound = bound
            if len(pinned) == before:
                return found

    def _require_one_stage_for_changes(self) -> None:
        """Raise if a buffer or parameter is changed by one stage and used by another."""
        record, used = self.record, dict[int, set[int]]()
        written: dict[int, str] = {}
        memories = set(record.state_memory.values())
        for step, stage in zip(record.steps, self.at, strict=True):
            for state in step.states:
                used.setdefault(record.state_memory[state.name], set()).add(stage)
            for memory in step.writes & memories:
                written[memory] = step.line
            if step.kind is Kind.UNIT:
                for name, memory in record.state_memory.items():
                    if name.startswith(f"{step.target}.") and memory in written:
                        used.setdefault(memory, set()).add(stage)
        for memory, line in written.items():
            if len(used.get(memory, ())) > 1:
                name = next(n for n, place in record.state_memory.items() if place == memory)
                raise PartitionError(
                    f"{line} changes {name!r}, which stages {sorted(used[memory])} use; cut the "
                    "model so that one stage has all uses of it"
                )
        calls: dict[str, set[int]] = {}
        for step, stage in zip(record.steps, self.at, strict=True):
            if step.kind is Kind.UNIT and step.target in record.changes_buffers:
                calls.setdefault(step.target, set()).add(stage)
        for name, stages in calls.items():
            if len(stages) > 1:
                *first, last = map(str, sorted(stages))
                raise PartitionError(
                    f"the forward calls {name!r} in stages {', '.join(first)} and {last}, and each "
                    "would change its own copy of the buffers; cut the model so that all calls are "
                    "in one stage"
                )

    def plans(self) -> list[StagePlan]:
        """What each stage does."""
        record = self.record
        guards = self._guards()
        needed = set(parts_in(record.result, Value))
        arguments = {value for step in guards for value in step.reads} & self.given
        found: list[StagePlan] = []
        for stage in reversed(range(self.stages)):
            sent = tuple(sorted(needed)) if found else ()
            steps, needed = self._steps_of(stage, needed)
            free_arguments = {v for v in needed if v in self.given and v not in self.bound}
            arguments |= free_arguments
            crossing = {v for v in needed if v in self.bound and self.homes[v] < stage}
            plan = StagePlan(steps, tuple(sorted(crossing)), sent, frozenset(arguments))
            plan.guards = guards
            if stage == 0:
                plan.first = frozenset(needed & self.given)
            plan.copied = self._copied(plan, stage)
            found.append(plan)
            needed = crossing
        return found[::-1]

    def _steps_of(self, stage: int, needed: set[Value]) -> tuple[list[Step], set[Value]]:
        """The steps of a stage that hands on some values, and all values that it needs."""
        needed, own, memory = set(needed), list[Step](), self.record.memory
        steps = zip(self.record.steps, self.at, self.is_free, strict=True)
        for step, at, free in reversed(list(steps)):
            if at > stage or (not free and at < stage):
                continue
            if step.kind is Kind.READ:
                wanted = not free
            else:
                wanted = not needed.isdisjoint(step.makes) or any(
                    memory[value] in step.writes for value in needed
                )
                if not free:
                    wanted |= step.kind is Kind.UNIT or step.draws or bool(step.writes)
                    wanted |= not step.makes
            if wanted:
                own.append(step)
                needed |= set(step.reads)
        return own[::-1], needed

    def _guards(self) -> list[Step]:
        """The reads of arguments, with the steps that they need."""
        own, needed, memory = list[Step](), set[Value](), self.record.memory
        steps = zip(self.record.steps, self.is_free, strict=True)
        for step, free in reversed(list(steps)):
            if not free:
                continue
            if (
                step.kind is Kind.READ
                or not needed.isdisjoint(step.makes)
                or any(memory[value] in step.writes for value in needed)
            ):
                own.append(step)
                needed |= set(step.reads)
        return own[::-1]

    def _copied(self, plan: StagePlan, stage: int) -> frozenset[Value]:
        """The values that a stage must copy before it changes them in place."""
        record = self.record
        writes = {memory: step for step in plan.steps for memory in step.writes}
        copied: dict[int, list[Value]] = {}
        for value in {*plan.received, *plan.first, *plan.arguments}:
            if record.memory[value] in writes:
                copied.setdefault(record.memory[value], []).append(value)
        for memory, values in copied.items():
            if len(values) > 1:
                step = writes[memory]
                raise PartitionError(
                    f"{step.line} changes a value in place in stage {stage}, which gets it from "
                    f"stage {stage - 1} together with a view of it ({record.names[values[0]]}); "
                    "change a copy (x.clone()), or cut the model elsewhere"
                )
        return frozenset(value for values in copied.values() for value in values)


def _stages_of(record: Record, cuts: Sequence[Cut], name: str) -> list[int]:
    """The stage in which each step is."""
    calls = record.unit_calls()
    for cut, following in zip(cuts, [*cuts[1:], None], strict=True):
        if cut not in calls:
            raise PartitionError(
                f"the forward of {name} does not call {cut!r}, so no stage can begin there; name "
                "a submodule that it calls"
            )
        if following is None or following not in calls:
            continue
        if calls.index(following) < calls.index(cut):
            raise PartitionError(
                f"the forward of {name} calls {following!r} before {cut!r}; list the cuts in the "
                "order of their calls"
            )
    found, stage, waiting = list[int](), 0, list(cuts)
    for step in record.steps:
        if step.kind is Kind.UNIT and waiting and Cut(step.target, step.call) == waiting[0]:
            waiting.pop(0)
            stage += 1
        found.append(stage)
    return found
