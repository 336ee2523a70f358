"""What a recorded forward consists of, and how it is cut: which stage runs what, what crosses.

What depends on the arguments of the model alone is *free*: each stage that needs it computes it by
itself. Everything else runs once, on the stage in which the forward has got to it::

    steps      mask = …   x = embed(…)   x = layers.0(x, mask)  ║  x = layers.1(x, mask)   norm(x)
               free       stage 0        stage 0                ║  stage 1                 stage 1
    stage 1 computes mask again, and x crosses
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch

from taktline.errors import PartitionError
from taktline.split.arguments import Path, State, Value, parts_in


class Cut(NamedTuple):
    """A call of a submodule with which a stage begins.

    >>> Cut.read("encoder.layer@3", ["encoder.layer"])
    'encoder.layer@3'
    """

    unit: str
    call: int = 0
    """Which call of the submodule, from 0 up."""

    @classmethod
    def read(cls, text: str, names: Container[str]) -> Cut:
        """Parse a cut; ``names`` are the submodules, whose names may contain an @."""
        unit, _, call = text.rpartition("@")
        if text in names or not (unit and call.isdecimal()):
            return cls(text)
        return cls(unit, int(call))

    def __str__(self) -> str:
        return f"{self.unit}@{self.call}" if self.call else self.unit

    def __repr__(self) -> str:
        return repr(str(self))


class StepKind(Enum):
    """What a step does."""

    UNIT = "unit"
    """Calls a submodule."""
    CALL = "call"
    """Calls a function."""
    READ = "read"
    """Reads numbers from tensors; they must be those that were recorded."""


_SETTINGS: list[tuple[Any, Any]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
]
"""What a forward may set for a part of it: how to ask, and how to set it."""


class Modes(NamedTuple):
    """The modes of torch in which a step runs."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype | None], ...]
    """For each type of device the type in which autocast computes; None if it is off."""
    settings: tuple[Any, ...]

    @classmethod
    def now(cls, devices: tuple[str, ...]) -> Modes:
        """The modes of this thread, for some types of devices."""
        autocast = [
            (each, torch.get_autocast_dtype(each) if torch.is_autocast_enabled(each) else None)
            for each in devices
        ]
        settings = tuple([ask() for ask, _ in _SETTINGS])
        return cls(torch.is_grad_enabled(), tuple(autocast), settings)

    @contextmanager
    def instead_of(self, outer: Modes) -> Iterator[None]:
        """Let these be the modes, where they differ from those outside."""
        with ExitStack() as stack:
            if self.grad != outer.grad:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            pairs = zip(_SETTINGS, self.settings, outer.settings, strict=True)
            for (ask, change), setting, before in pairs:
                if setting != before:
                    stack.callback(change, ask())
                    change(setting)
            for (device, dtype), (_, before) in zip(self.autocast, outer.autocast, strict=True):
                if dtype != before:
                    stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
            yield


class CheckpointRegion(NamedTuple):
    """A checkpointed part of the forward."""

    number: int
    preserves_rng: bool


class Place(NamedTuple):
    """Where a step leaves a tensor: a path from a root."""

    path: Path
    root: Literal["output", "arguments", "attributes", "inner output"] = "output"
    module: str = ""
    """The module inside of the unit, for the last two roots."""
    call: int = 0
    """Which call of that module inside of the unit."""


@dataclass(eq=False, slots=True)
class Step:
    """One step of the forward."""

    kind: StepKind
    target: Any
    """A function, or the name of a unit."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modes: Modes
    line: str
    """Where the user's code does this."""
    region: tuple[CheckpointRegion, ...]
    """The checkpoints around it, from the outermost on."""
    places: dict[Value, Place] = field(default_factory=dict)
    """Where the tensors are that it makes."""
    constants: list[tuple[Path, Any]] = field(default_factory=list)
    """The numbers, texts and None in the output of a unit."""
    found: Any = None
    """What a read has found."""
    is_guard: bool = False
    """Whether a read asks for data of arguments alone."""
    writes: frozenset[int] = frozenset()
    """The memory that it changes."""
    draws: bool = False
    """Whether it must run once alone: it draws random numbers, or has side effects."""
    call: int = 0
    """Of a unit: which call of it."""

    @property
    def reads(self) -> list[Value]:
        """The values that it needs."""
        return parts_in((self.args, self.kwargs), Value)

    @property
    def states(self) -> list[State]:
        """The parameters and buffers that it needs."""
        return parts_in((self.args, self.kwargs), State)


@dataclass(eq=False)
class Record:
    """A forward that was recorded once."""

    given: tuple[tuple[Any, ...], dict[str, Any]]
    """The arguments of the model, with values in the places of tensors."""
    steps: list[Step]
    result: Any
    modes: Modes
    """Those in which the forward was called."""
    states: list[State]
    values: list[Value] = field(default_factory=list)
    sized: set[Value] = field(default_factory=set)
    """The values whose sizes depend on data."""
    costs: dict[Cut, int] = field(default_factory=dict)
    """What each call of a unit costs, in the order of the calls."""
    runs: Counter[str] = field(default_factory=Counter)
    """How often each module has run, also inside of units."""
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """Calls of modules that are in no unit: the first step of each, and the one after it."""
    marks: list[int] = field(default_factory=list)
    """The steps before which the forward has called ``pipe_split()``."""
    marked_units: set[str] = field(default_factory=set)
    """The units that call ``pipe_split()`` inside."""

    def calls(self) -> Counter[str]:
        """How often each unit is called."""
        return Counter(cut.unit for cut in self.costs)


@dataclass(eq=False)
class StagePlan:
    """What one stage does."""

    steps: list[Step]
    received: tuple[Value, ...]
    """The values that come from the stage before."""
    sent: tuple[Value, ...]
    """The values that go to the next stage."""
    arguments: frozenset[Value]
    """The arguments of the model that this stage or a later one gets."""
    copied: frozenset[Value]
    """The arguments and received values that the stage changes in place."""
    guards: list[Step]
    """The reads of arguments that must be as they were recorded, and what they need."""

    @property
    def units(self) -> dict[str, None]:
        """The units that the stage calls."""
        return {step.target: None for step in self.steps if step.kind is StepKind.UNIT}


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
        for step, stage in self.at.items():
            for value in step.places:
                self.homes.setdefault(value, stage)
        self.writes = {memory: step for step in record.steps for memory in step.writes}
        self.changed = [state for state in record.states if state.memory in self.writes]
        self.free, self.bound = self._find_free()
        self._require_one_stage_for_changes()

    def _find_free(self) -> tuple[set[Step], set[Value]]:
        """The steps that depend on the arguments alone, and the values that do not."""
        record, pinned = self.record, set[int]()
        while True:
            bound = {value for value in record.values if value.memory in pinned}
            free, made, before = set[Step](), set(self.given), len(pinned)
            for step in record.steps:
                if (
                    step.kind is not StepKind.UNIT
                    and not step.draws
                    and bound.isdisjoint((*step.reads, *step.places))
                    and not any(s.is_parameter or s in self.changed for s in step.states)
                ):
                    free.add(step)
                else:
                    bound.update(value for value in step.places if value not in made)
                    pinned |= step.writes
                made.update(step.places)
            if len(pinned) == before:
                return free, bound

    def _require_one_stage_for_changes(self) -> None:
        """Raise if a buffer or parameter is changed by one stage and used by another."""
        uses = defaultdict[int, set[int]](set)
        for step, stage in self.at.items() if self.changed else ():
            used = {each.memory for each in (*step.reads, *step.states)}
            unit = f"{step.target}." if step.kind is StepKind.UNIT else "?"
            for state in self.changed:
                if state.memory in used or any(name.startswith(unit) for name in state.names):
                    uses[state.memory].add(stage)
        for state in self.changed:
            if len(stages := sorted(uses[state.memory])) > 1:
                raise PartitionError(
                    f"{self.writes[state.memory].line} changes {state.name!r}, which stages "
                    f"{stages} use; cut the model so that one stage has all uses of it"
                )

    def plans(self) -> list[StagePlan]:
        """What each stage does."""
        reads = [step for step in self.at if step in self.free]
        guards, needed = self._needed(reads, set(), lambda step: step.kind is StepKind.READ)
        arguments = needed & self.given
        needed, received = set(parts_in(self.record.result, Value)), tuple[Value, ...]()
        found: list[StagePlan] = []
        for stage in reversed(range(self.stages)):
            sent = received if found else ()
            own = [s for s, at in self.at.items() if at == stage or (at < stage and s in self.free)]
            steps, needed = self._needed(own, needed, self._must_run)
            arguments |= (needed & self.given) - self.bound
            crossing = {v for v in needed & self.bound if self.homes[v] < stage}
            received = tuple(sorted(crossing, key=lambda value: value.number))
            given = self.given if stage == 0 else arguments
            copied = self._copied(steps, {*received, *given}, stage)
            found.append(StagePlan(steps, received, sent, frozenset(arguments), copied, guards))
            needed = crossing
        return found[::-1]

    def _must_run(self, step: Step) -> bool:
        """Whether a step runs even if nothing needs what it makes."""
        is_pure = step.kind is StepKind.CALL and not step.draws and not step.writes and step.places
        return step not in self.free and not is_pure

    def _needed(
        self, steps: Sequence[Step], needed: set[Value], must_run: Callable[[Step], bool]
    ) -> tuple[list[Step], set[Value]]:
        """Those of some steps that run, if later ones need these values; and all values needed."""
        needed, own = set(needed), list[Step]()
        for step in reversed(steps):
            if (
                must_run(step)
                or not needed.isdisjoint(step.places)
                or any(value.memory in step.writes for value in needed)
            ):
                own.append(step)
                needed.update(step.reads)
        return own[::-1], needed

    def _copied(self, steps: Sequence[Step], given: set[Value], stage: int) -> frozenset[Value]:
        """The values that a stage must copy before it changes them in place."""
        writes = {place: step for step in steps for place in step.writes}
        copied: dict[int, Value] = {}
        for value in given:
            step = writes.get(value.memory)
            if step is not None and copied.setdefault(value.memory, value) is not value:
                raise PartitionError(
                    f"{step.line} changes a value in place in stage {stage}, which gets it from "
                    f"stage {stage - 1} together with a view of it ({value.name}); "
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
                "a submodule that it calls, as block(x), not block.forward(x)"
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
