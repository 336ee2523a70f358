"""Where stages begin, what goes on in a model's forward, and what crosses, as a walk has seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from taktline.split.named.placeholder import Absent

__all__ = ["Course", "Cut", "Path", "Value"]

Path = tuple[Any, ...]
"""A place among the arguments of a call, as pytree has it."""


class Cut(NamedTuple):
    """A call of a submodule, with which a stage begins.

    >>> Cut.read("encoder.layer@3", ["encoder.layer"])
    'encoder.layer@3'
    """

    unit: str
    call: int = 0
    """Which call of the submodule, from 0 up."""

    @classmethod
    def read(cls, text: str, names: Container[str]) -> Cut:
        """What a text says; ``names`` are those of submodules, which may have an @ themselves."""
        unit, _, call = text.rpartition("@")
        if text in names or not (unit and call.isdecimal()):
            return cls(text)
        return cls(unit, int(call))

    def __str__(self) -> str:
        return f"{self.unit}@{self.call}" if self.call else self.unit

    def __repr__(self) -> str:
        return repr(str(self))


class Value(NamedTuple):
    """A tensor among the arguments or the output of a call of a unit."""

    unit: str
    call: int
    """Which call of the unit, from 0 up."""
    is_output: bool
    leaf: int

    def __str__(self) -> str:
        return f"{self.unit} (its {'output' if self.is_output else 'argument'})"


@dataclass(slots=True)
class Course:
    """What a walk has seen."""

    order: list[tuple[str, int]] = field(default_factory=list)
    """The calls of units, and of what is inside of units, with their stages."""
    calls: dict[str, list[int]] = field(default_factory=dict)
    """The stages in which each unit is called, in the order of its calls."""
    units: dict[str, set[int]] = field(default_factory=dict)
    """The stages that use parameters of a unit without a call of it."""
    uses: dict[str, set[int]] = field(default_factory=dict)
    """The stages in which each parameter of a container is used."""
    crossings: list[frozenset[Path]] = field(default_factory=list)
    """For each cut the places, among the arguments of its unit, of what comes from before it."""
    beside: list[list[Value]] = field(default_factory=list)
    """For each cut what else comes from before it."""
    changed: frozenset[str] = frozenset()
    """The buffers and attributes that the forward changes by itself."""
    hooked: frozenset[str] = frozenset()
    """The models inside of the model that register hooks with their layers, to collect outputs."""
    opened: set[int] = field(default_factory=set)
    """Which checkpoints, in the order of their calls, a cut goes through."""
    numbers: list[int] = field(default_factory=list)
    """For each cut how many numbers cross that the forward asks for, as it may do at most."""
    looks: dict[Value, Absent] = field(default_factory=dict)
    """What the values look like that come beside."""
    guessed: list[int] = field(default_factory=list)
    """Which numbers were guessed, of those that cross."""
    is_sized: bool = False
    """Whether the size of a tensor was guessed, of the numbers that cross."""
    is_guessed: bool = False
    """Whether a number was guessed, so that another micro-batch may go another way."""
    is_asking: bool = False
    """Whether the forward asks any tensor for a number, also one that every stage has."""
    is_drawing: bool = False
    """Whether the forward draws random numbers by itself."""

    def join(self, other: Course) -> None:
        """Let this be what either of two walks has seen, which have guessed otherwise."""
        if len(other.order) > len(self.order):
            self.order, other.order = other.order, self.order
        for mine, others in ((self.units, other.units), (self.uses, other.uses)):
            for name, stages in others.items():
                mine.setdefault(name, set()).update(stages)
        for name, stages in other.calls.items():
            known = self.calls.setdefault(name, [])
            known += [stage for stage in stages if stage not in known]
        pairs = zip(self.crossings, other.crossings, strict=True)
        self.crossings = [one | another for one, another in pairs]
        pairs = zip(self.beside, other.beside, strict=True)
        self.beside = [sorted({*one, *another}) for one, another in pairs]
        self.numbers = list(map(max, self.numbers, other.numbers))
        self.is_sized |= other.is_sized
        self.looks |= other.looks
        self.changed |= other.changed
        self.hooked |= other.hooked
        self.opened |= other.opened

    def cuts(self) -> list[Cut]:
        """The calls of units, in their order."""
        seen: Counter[str] = Counter()
        found: list[Cut] = []
        for name, _ in self.order:
            if name in self.calls:
                found.append(Cut(name, seen[name]))
                seen[name] += 1
        return found
