"""Cuts a recorded forward: which steps each stage runs, and which values cross.

What depends on the arguments of the model alone is *free*: each stage that needs it computes it by
itself. Everything else runs once, on the stage in which the forward has got to it::

    steps      mask = …   x = embed(…)   x = layers.0(x, mask)  ║  x = layers.1(x, mask)   norm(x)
               free       stage 0        stage 0                ║  stage 1                 stage 1
    stage 1 computes mask again, and x crosses
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from taktline.errors import PartitionError
from taktline.split.nested import State, Value, parts_in
from taktline.split.steps import Cut, Record, Step, StepKind


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
        return {step.target: None for step in self.steps if step.kind is StepKind.UNIT}

    def states(self, record: Record, *, is_last: bool) -> dict[str, None]:
        """The parameters and buffers that the stage itself uses."""
        found = {s.name: None for step in (*self.guards, *self.steps) for s in step.states}
        if is_last:
            found |= {state.name: None for state in parts_in(record.result, State)}
        return found


class StepPlacement:
    """Which stage runs each step.

    Args:
        record: the forward.
        starts: the numbers of the steps with which stages begin, from the second on.
    """

    def __init__(self, record: Record, starts: Sequence[int]) -> None:
        self.record = record
        self.stages = len(starts) + 1
        self.at = {step: bisect(starts, place) for place, step in enumerate(record.steps)}
        self.given = set(parts_in(record.given, Value))
        self.homes: dict[Value, int] = dict.fromkeys(self.given, 0)
        self.made: dict[Step, list[Value]] = {}
        for step, stage in self.at.items():
            self.made[step] = [value for value in step.makes if value not in self.homes]
            self.homes |= dict.fromkeys(self.made[step], stage)
        self.free, self.bound = self._find_free()
        self._require_one_stage_for_changes()

    def _find_free(self) -> tuple[set[Step], set[Value]]:
        """The steps that depend on the arguments alone, and the values that do not."""
        record, pinned = self.record, set[int]()
        written = {memory for step in record.steps for memory in step.writes}
        changed = {n for n, memory in record.state_memory.items() if memory in written}
        while True:
            bound = {value for value, memory in record.memory.items() if memory in pinned}
            free, before = set[Step](), len(pinned)
            for step in record.steps:
                if (
                    step.kind is not StepKind.UNIT
                    and not step.draws
                    and bound.isdisjoint((*step.reads, *step.makes))
                    and not any(s.name in record.is_parameter for s in step.states)
                    and not any(s.name in changed for s in step.states)
                ):
                    free.add(step)
                else:
                    bound.update(self.made[step])
                    pinned |= step.writes
            if len(pinned) == before:
                return free, bound

    def _require_one_stage_for_changes(self) -> None:
        """Raise if a buffer or parameter is changed by one stage and used by another."""
        record, uses = self.record, defaultdict[int, set[int]](set)
        writes = {memory: step for step in self.at for memory in step.writes}
        changed = {n: memory for n, memory in record.state_memory.items() if memory in writes}
        for step, stage in self.at.items() if changed else ():
            states = {state.name for state in step.states}
            viewed = {record.memory[value] for value in step.reads}
            unit = f"{step.target}." if step.kind is StepKind.UNIT else "?"
            for name, memory in changed.items():
                if name in states or memory in viewed or name.startswith(unit):
                    uses[memory].add(stage)
        for name, memory in changed.items():
            if len(uses[memory]) > 1:
                raise PartitionError(
                    f"{writes[memory].line} changes {name!r}, which stages {sorted(uses[memory])} "
                    "use; cut the model so that one stage has all uses of it"
                )
        for name in record.changes_buffers:
            stages = {
                at for s, at in self.at.items() if s.kind is StepKind.UNIT and s.target == name
            }
            if len(stages) > 1:
                *first, last = map(str, sorted(stages))
                raise PartitionError(
                    f"the forward calls {name!r} in stages {', '.join(first)} and {last}, and each "
                    "would change its own copy of the buffers; cut the model so that all calls are "
                    "in one stage"
                )

    def plans(self) -> list[StagePlan]:
        """What each stage does."""
        free = [step for step in self.at if step in self.free]
        guards, needed = self._needed(free, set(), lambda step: step.kind is StepKind.READ)
        arguments = needed & self.given
        needed = set(parts_in(self.record.result, Value))
        found: list[StagePlan] = []
        for stage in reversed(range(self.stages)):
            sent = tuple(sorted(needed)) if found else ()
            own = [s for s, at in self.at.items() if at == stage or (at < stage and s in self.free)]
            steps, needed = self._needed(own, needed, self._must_run)
            arguments |= (needed & self.given) - self.bound
            crossing = {v for v in needed & self.bound if self.homes[v] < stage}
            plan = StagePlan(steps, tuple(sorted(crossing)), sent, frozenset(arguments))
            plan.guards = guards
            if stage == 0:
                plan.first = frozenset(needed & self.given)
            plan.copied = self._copied(plan, stage)
            found.append(plan)
            needed = crossing
        return found[::-1]

    def _must_run(self, step: Step) -> bool:
        """Whether a step runs even if nothing needs what it makes."""
        is_pure = step.kind is StepKind.CALL and not step.draws and not step.writes and step.makes
        return step not in self.free and not is_pure

    def _needed(
        self, steps: Sequence[Step], needed: set[Value], must_run: Callable[[Step], bool]
    ) -> tuple[list[Step], set[Value]]:
        """Those of some steps that run, if later ones need these values; and all values needed."""
        needed, own, memory = set(needed), list[Step](), self.record.memory
        for step in reversed(steps):
            if (
                must_run(step)
                or not needed.isdisjoint(step.makes)
                or any(memory[value] in step.writes for value in needed)
            ):
                own.append(step)
                needed.update(step.reads)
        return own[::-1], needed

    def _copied(self, plan: StagePlan, stage: int) -> frozenset[Value]:
        """The values that a stage must copy before it changes them in place."""
        memory = self.record.memory
        writes = {place: step for step in plan.steps for place in step.writes}
        copied: dict[int, Value] = {}
        for value in {*plan.received, *plan.first, *plan.arguments}:
            step = writes.get(memory[value])
            if step is not None and copied.setdefault(memory[value], value) != value:
                raise PartitionError(
                    f"{step.line} changes a value in place in stage {stage}, which gets it from "
                    f"stage {stage - 1} together with a view of it ({self.record.names[value]}); "
                    "change a copy (x.clone()), or cut the model elsewhere"
                )
        return frozenset(copied.values())


def starts_of(record: Record, cuts: Sequence[Cut], name: str) -> list[int]:
    """The steps that are the calls at which a model is cut; ``name`` is the model's in errors."""
    calls = {cut: place for place, cut in enumerate(record.costs)}
    for cut in cuts:
        if cut not in calls:
            raise PartitionError(
                f"the forward of {name} does not call {cut!r}, so no stage can begin there; name "
                "a submodule that it calls"
            )
    for cut, following in pairwise(cuts):
        if calls[following] < calls[cut]:
            raise PartitionError(
                f"the forward of {name} calls {following!r} before {cut!r}; list the cuts in the "
                "order of their calls"
            )
    places = {
        Cut(step.target, step.call): place
        for place, step in enumerate(record.steps)
        if step.kind is StepKind.UNIT
    }
    return [places[cut] for cut in cuts]
