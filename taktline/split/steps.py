"""What a recorded forward consists of: values, and the steps that make them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from taktline.split.nested import Path, parts_in


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


class Value(NamedTuple):
    """A tensor of the forward: an argument of the model, or what a step makes."""

    number: int


class State(NamedTuple):
    """A parameter or buffer of the model that the forward itself uses."""

    name: str


class Kind(Enum):
    """What a step does."""

    UNIT = "unit"
    """Calls a submodule."""
    CALL = "call"
    """Calls a function."""
    READ = "read"
    """Reads numbers from tensors; they must be those that were recorded."""


class Modes(NamedTuple):
    """The modes of torch in which a step runs."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype | None], ...]
    """For each type of device the type in which autocast computes; None if it is off."""

    @classmethod
    def now(cls, devices: tuple[str, ...]) -> Modes:
        """The modes of this thread, for some types of devices."""
        autocast = [
            (each, torch.get_autocast_dtype(each) if torch.is_autocast_enabled(each) else None)
            for each in devices
        ]
        return cls(torch.is_grad_enabled(), tuple(autocast))


class Region(NamedTuple):
    """A checkpointed part of the forward."""

    number: int
    preserves_rng: bool


class Extra(NamedTuple):
    """A tensor that a unit leaves elsewhere than in its output."""

    value: Value
    where: str
    """``arguments``: in a list or dict among them; ``attribute``; ``inside``: of a submodule."""
    module: str
    """The submodule of the unit, for an attribute, and for an output inside."""
    path: Path
    """The place in the arguments, in the attributes, or in the output."""
    call: int = 0
    """Which call of the submodule inside of the unit."""


@dataclass(eq=False, slots=True)
class Step:
    """One step of the forward."""

    kind: Kind
    target: Any
    """A function, or the name of a unit."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    """With values in the places of tensors; of a read, what was read."""
    modes: Modes
    line: str
    """Where the user's code does this."""
    region: tuple[Region, ...] = ()
    """The checkpoints around it, from the outermost on."""
    writes: frozenset[int] = frozenset()
    """The memory that it changes."""
    draws: bool = False
    """Whether it must run once alone: it draws random numbers, or has side effects."""
    extras: list[Extra] = field(default_factory=list)
    call: int = 0
    """Of a unit: which call of it."""
    is_known: bool = True
    """Of a read: whether it reads data of arguments alone."""

    @property
    def reads(self) -> list[Value]:
        """The values that it needs."""
        return parts_in((self.args, self.kwargs), Value)

    @property
    def states(self) -> list[State]:
        """The parameters and buffers that it needs."""
        return parts_in((self.args, self.kwargs), State)

    @property
    def makes(self) -> list[Value]:
        """The values that it returns or leaves elsewhere."""
        if self.kind is Kind.READ:
            return []
        return [*parts_in(self.output, Value), *(extra.value for extra in self.extras)]


@dataclass(eq=False)
class Record:
    """A forward that was recorded once."""

    given: tuple[tuple[Any, ...], dict[str, Any]]
    """The arguments of the model, with values in the places of tensors."""
    steps: list[Step]
    result: Any
    modes: Modes
    """Those in which the forward was called."""
    memory: dict[Value, int]
    """The memory in which each value lies; views of a value lie in the same."""
    state_memory: dict[str, int]
    """The memory of parameters and buffers."""
    aliases: dict[str, tuple[str, ...]]
    """Of a tied parameter: all names that the model has for it."""
    is_parameter: Container[str]
    """The names of parameters."""
    names: dict[Value, str]
    """How to call a value in a message."""
    changes_buffers: set[str] = field(default_factory=set)
    """The units that change their buffers."""
    sized: set[Value] = field(default_factory=set)
    """The values whose sizes depend on data."""
    metas: dict[Value, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    """The shape and type of each value."""
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
