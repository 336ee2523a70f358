"""What the calls of a stage that look alike have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from taktline import pytree
from taktline.split.example import Call
from taktline.split.named.course import Course, Path, Value
from taktline.split.named.mutable import is_constant
from taktline.split.named.placeholder import Absent, Placeholder
from taktline.split.named.program import Program
from taktline.split.named.script import Script

__all__ = ["Call", "Kind", "found_at"]


@dataclass(slots=True)
class Kind:
    """What is known of such calls, and what was remembered of the first one."""

    entering: frozenset[Path] = frozenset()
    """Places among the arguments of the unit with which this stage begins."""
    takes: tuple[Value, ...] = ()
    """What comes beside these."""
    crossing: frozenset[Path] = frozenset()
    """Places among the arguments of the unit with which the next stage begins."""
    sends: tuple[Value, ...] = ()
    """What goes to it beside these."""
    asked: int = 0
    """How many numbers come that the forward has asked for; they are the last of all values."""
    asks: int = 0
    """How many go to the next stage."""
    is_sized: bool = False
    """Whether sizes of tensors are among them."""
    looks: Mapping[Value, Absent] = field(default_factory=dict)
    """What values look like that a micro-batch which goes another way has not."""
    is_guessed: bool = False
    """Whether what a micro-batch does may depend on its data."""
    order: tuple[str, ...] | None = None
    """The calls of units up to the end of this stage; None if they depend on more than shapes."""
    changed: frozenset[str] = frozenset()
    """The buffers and attributes that the forward changes by itself."""
    opened: frozenset[int] = frozenset()
    """The checkpoints that a cut goes through."""
    needed: tuple[bool, ...] = ()
    """For each leaf of the model's arguments, whether a later stage needs its data."""
    is_checked: bool = False
    """Whether a stage has been seen to do what the whole model does."""
    changes: bool | None = None
    """Whether what comes from the stage before is changed in place; None: to be seen."""
    is_plain: bool = False
    """Whether the forward may be left out, as what it calls depends on shapes and numbers alone."""
    is_open: bool = True
    """Whether there may be a script."""
    script: Script | None = None
    program: Program | None = None
    _placeholders: dict[Absent, Placeholder] = field(default_factory=dict)
    _exits: tuple[Path, ...] = ()
    """The places that cross, in their order."""
    _call: Call | None = None
    """The arguments of the model, if they are the same each time."""
    _handed_on: Call | None = None
    """The same of those for the next stage."""
    _is_handed_on: bool = False
    """Whether the next stage gets them as they have come."""

    @classmethod
    def of(cls, came: Call, device: torch.device) -> Kind:
        """The kind of a call of which nothing is known."""
        made = cls()

        def placeholder(absent: Absent) -> Placeholder:
            if absent not in made._placeholders:
                made._placeholders[absent] = absent.as_placeholder(device)
            return made._placeholders[absent]

        call = _with_placeholders(came, placeholder)
        leaves = pytree.tree_leaves(call)
        made.is_plain = all(isinstance(leaf, torch.Tensor) or is_constant(leaf) for leaf in leaves)
        made._call = call if all(map(_is_known, leaves)) else None
        return made

    def follow(self, course: Course, stage: int) -> None:
        """Take over what a walk has seen of a stage."""
        if stage:
            self.entering = course.crossings[stage - 1]
            self.takes = tuple(course.beside[stage - 1])
            self.asked = course.numbers[stage - 1]
        if stage < len(course.crossings):
            self.crossing = course.crossings[stage]
            self.sends = tuple(course.beside[stage])
            self.asks = course.numbers[stage]
        if not (course.is_guessed or course.is_drawing):
            self.order = tuple(name for name, where in course.order if where <= stage)
        self.is_sized = course.is_sized
        self.changed = course.changed
        self.opened = frozenset(course.opened)
        if self.takes or self.sends or self.changed or course.is_asking or course.is_drawing:
            self.is_plain = False
        self.is_guessed = course.is_guessed
        if course.is_guessed:
            self.looks = course.looks
        # A later stage that finds itself on another way than its script begins anew.
        self.is_open = not (self.asked or self.asks or (stage and course.is_drawing))

    def call(self, came: Call) -> Call:
        """The arguments of the model, with placeholders for those whose data has not come."""
        if not self._placeholders:
            return came
        return self._call or _with_placeholders(came, self._placeholders.__getitem__)

    def packed(
        self,
        arguments: Any,
        beside: tuple[torch.Tensor, ...],
        came: Call,
        require_data: Callable[[Any], Any],
    ) -> tuple[Any, ...]:
        """What crosses a boundary: values, and the arguments that the model was called with."""
        values = tuple([found_at(arguments, path) for path in self._exits])
        if not values or not all(type(value) is torch.Tensor for value in values):
            leaves, _ = pytree.tree_flatten_with_path(arguments)
            crossing = [(path, leaf) for path, leaf in leaves if path in self.crossing]
            self._exits = tuple(path for path, _ in crossing)
            values = tuple(require_data(leaf) for _, leaf in crossing)
        return self.handed_on((*values, *beside), came)

    def handed_on(self, values: tuple[Any, ...], came: Call) -> tuple[Any, ...]:
        """Values for the next stage, with as much as it needs of the model's arguments."""
        if self._is_handed_on:
            return values, *came
        if self._handed_on is not None:
            return values, *self._handed_on
        leaves, spec = pytree.tree_flatten(self.call(came))
        stays = [
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and not self.needed[place]
        ]
        self._is_handed_on = all(isinstance(leaves[place], Placeholder) for place in stays)
        for place in stays:
            leaves[place] = Absent(tuple(leaves[place].shape), leaves[place].dtype)
        handed_on = pytree.tree_unflatten(leaves, spec)
        if all(map(_is_known, leaves)):
            self._handed_on = handed_on
        return values, *handed_on


def found_at(tree: Any, path: Path) -> Any:
    """What is in a place; None if there is no such place."""
    try:
        for key in path:
            tree = key.get(tree)
    except (LookupError, AttributeError, TypeError):
        return None
    return tree


def _with_placeholders(came: Call, placeholder: Callable[[Absent], Placeholder]) -> Call:
    return pytree.tree_map_only(
        Absent, placeholder, came, is_leaf=lambda part: isinstance(part, Absent)
    )


def _is_known(leaf: object) -> bool:
    """Whether a leaf is the same in all calls that look alike."""
    return isinstance(leaf, (Placeholder, Absent)) or is_constant(leaf)
