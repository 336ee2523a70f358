"""What a dry run has seen of a model's forward: its calls, and the tensors that cross each cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from taktline.split.named.placeholder import Absent

Path = tuple[Any, ...]
"""The place of a leaf among the arguments of a call, as pytree writes it."""


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


class UnitTensor(NamedTuple):
    """A tensor among the arguments or in the output of a call of a unit."""

    unit: str
    call: int
    """Which call of the unit, from 0 up."""
    is_output: bool
    leaf: int

    def __str__(self) -> str:
        return f"{self.unit} (its {'output' if self.is_output else 'argument'})"


@dataclass(slots=True)
class Boundary:
    """What crosses a cut."""

    arguments: frozenset[Path] = frozenset()
    """Which arguments of the first unit after the cut come from earlier stages."""
    extras: list[UnitTensor] = field(default_factory=list)
    """The other tensors that cross, in order."""
    numbers: int = 0
    """How many numbers cross at most that the forward reads from tensors."""

    def join(self, other: Boundary) -> Boundary:
        """What crosses in either of two dry runs."""
        extras = sorted({*self.extras, *other.extras})
        return Boundary(self.arguments | other.arguments, extras, max(self.numbers, other.numbers))


@dataclass(slots=True)
class ForwardSummary:
    """What a dry run has seen."""

    order: list[tuple[str, int]] = field(default_factory=list)
    """The calls of units, and of modules inside of units, with their stages."""
    calls: dict[str, list[int]] = field(default_factory=dict)
    """The stages that call each unit, in the order of the calls."""
    uses: dict[str, set[int]] = field(default_factory=dict)
    """The stages that use a parameter of a container, or those of a unit without a call of it."""
    boundaries: list[Boundary] = field(default_factory=list)
    """What crosses each cut."""
    changed: frozenset[str] = frozenset()
    """The buffers and attributes that the forward itself changes."""
    written: frozenset[int] = frozenset()
    """The leaves of the model's arguments that the forward itself changes in place."""
    hooked: frozenset[str] = frozenset()
    """The models inside of the model that register hooks with their layers."""
    opened: set[int] = field(default_factory=set)
    """The numbers of the checkpoints that a cut goes through."""
    shapes: dict[UnitTensor, Absent] = field(default_factory=dict)
    """The shapes and types of the extras."""
    guessed: list[int] = field(default_factory=list)
    """Which of the numbers that cross were guessed."""
    is_sized: bool = False
    """Whether sizes of tensors are among them."""
    is_guessed: bool = False
    """Whether any number was guessed, so that another micro-batch may take another branch."""
    reads_numbers: bool = False
    """Whether the forward reads a number from any tensor."""
    draws: bool = False
    """Whether the forward itself draws random numbers."""

    def join(self, other: ForwardSummary) -> None:
        """Add what a dry run with other guesses has seen."""
        self.order = max(self.order, other.order, key=len)
        for name, stages in other.uses.items():
            self.uses.setdefault(name, set()).update(stages)
        for name, stages in other.calls.items():
            known = self.calls.setdefault(name, [])
            known += [stage for stage in stages if stage not in known]
        pairs = zip(self.boundaries, other.boundaries, strict=True)
        self.boundaries = [one.join(another) for one, another in pairs]
        self.is_sized |= other.is_sized
        self.shapes |= other.shapes
        self.changed |= other.changed
        self.written |= other.written
        self.hooked |= other.hooked
        self.opened |= other.opened

    def unit_calls(self) -> list[Cut]:
        """The calls of units, in order."""
        seen: Counter[str] = Counter()
        found: list[Cut] = []
        for name, _ in self.order:
            if name in self.calls:
                found.append(Cut(name, seen[name]))
                seen[name] += 1
        return found
