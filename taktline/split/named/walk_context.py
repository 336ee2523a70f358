"""The forward of a model without data: where its values come from, and which of them cross cuts.

A stage begins with a unit, and gets what the forward hands to it. What it uses beside that, of what
earlier stages have made, crosses too: what a unit has returned, or was given, under its name; what
the forward has made of such values by itself is made of them again where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.example import Args, Kwargs
from taktline.split.named.checkpoints import Checkpoints
from taktline.split.named.course import Course, Cut, Path, Value
from taktline.split.named.layout import Layout
from taktline.split.named.numbers import Guess, Numbers
from taktline.split.named.placeholder import ANYWHERE, Absent, Placeholder
from taktline.split.named.recorded import replayed
from taktline.split.named.shape_probe import ShapeProbe

__all__ = ["Walk"]


class _Place(NamedTuple):
    """Where a placeholder was seen as an argument of a unit."""

    value: Value
    stage: int
    time: int


@dataclass(slots=True, eq=False)
class _History:
    """Where a placeholder comes from."""

    stage: int
    time: int
    parents: Sequence[Placeholder] = ()
    """What an operation has made it of."""
    is_drawn: bool = False
    """Whether the operation draws random numbers."""
    is_view: bool = False
    """Whether it has its data in common with what it is made of."""
    output: Value | None = None
    """The output of a unit that it is."""
    places: list[_Place] = field(default_factory=list)
    """Its first place in each stage."""
    written: int = 0
    """When it was changed in place."""

    def named(self, before: int) -> _Place | None:
        """By which name it is to be had, to make of it what was made at a time."""
        found = [place for place in self.places if self.written <= place.time < before]
        if self.output is not None and not self.written:
            found.insert(0, _Place(self.output, self.stage, self.time))
        # In the last stage that has it; there, as early as possible.
        return next((place for place in found if place.stage == found[-1].stage), None)

    def place(self, value: Value, stage: int, time: int) -> None:
        """Note a place."""
        if not self.places or self.places[-1].stage < stage or self.places[-1].time < self.written:
            self.places.append(_Place(value, stage, time))


class Walk(Checkpoints):
    """The forward of a model in which all is foreign, and the stage that it has come to."""

    mixed = True
    is_inside = False

    def __init__(
        self,
        course: Course,
        layout: Layout,
        device: torch.device,
        *,
        guess: Guess,
        anew: bool,
        refused: set[Cut] | None,
        at_end: Callable[[int], None] | None,
    ) -> None:
        super().__init__(device)
        self.refused = refused
        self.at_end = at_end
        self.arguments: set[int] = set()
        """The ids of the tensors that the model is called with."""
        self.course = course
        self.numbers = Numbers(self, guess=guess)
        self._layout = layout
        self._anew = anew
        self._stage = 0
        self._time = 1
        self._needs: dict[Value, tuple[int, int]] = {}
        """Of values that cross: the stages that has and that last needs it."""

    def source(self, placeholders: Sequence[Placeholder]) -> Placeholder:
        """One that is made by a stage, if there is any."""
        for placeholder in placeholders:
            if placeholder.parameter:
                self.course.uses.setdefault(placeholder.maker, set()).add(self._stage)
        return min(placeholders, key=lambda placeholder: placeholder.stage)

    def note_made(self, made: Placeholder, placeholders: Sequence[Placeholder], func: Any) -> None:
        """Note what a placeholder is made of."""
        made.history = self._history(tuple(placeholders))
        made.history.is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        made.history.is_view = any(part.alias_info is not None for part in func._schema.returns)

    def note_written(
        self, placeholder: Placeholder, placeholders: Sequence[Placeholder], func: Any
    ) -> None:
        """Note that a placeholder was changed in place, and what it is a view of."""
        others = tuple(other for other in placeholders if other is not placeholder)
        written = [placeholder]
        while written:
            history: _History | None = written.pop().history
            if history is not None:
                history.written = self._now()
                history.is_drawn |= torch.Tag.nondeterministic_seeded in func.tags
                written += history.parents if history.is_view else ()
                history.parents = (*history.parents, *others)

    def note_asked(self, placeholder: Placeholder) -> None:
        """See to it that a stage which asks for a number has the data."""
        self._bring(placeholder, "the forward")

    def is_open(self, checkpoint: int) -> bool:
        """Always: there is no data to be kept."""
        return True

    def note_inner(self, name: str) -> None:
        """Note a call of what is inside of a unit."""
        self.course.order.append((name, self._stage))

    def call_foreign(self, probe: ShapeProbe, training: bool, args: Args, kwargs: Kwargs) -> Any:
        """Note a call, and return its placeholders."""
        leaves = pytree.tree_leaves((args, kwargs))
        placeholders = [(place, x) for place, x in enumerate(leaves) if isinstance(x, Placeholder)]
        calls = self.course.calls.setdefault(probe.name, [])
        call = len(calls)
        if (probe.name, call) in self._layout.cuts:
            self._begin(Cut(probe.name, call), args, kwargs)
        calls.append(self._stage)
        self.course.order.append((probe.name, self._stage))
        for place, placeholder in placeholders:
            self._bring(placeholder, repr(probe.name))
            if placeholder.history is not None:
                placeholder.history.place(
                    Value(probe.name, call, False, place), self._stage, self._now()
                )
        if self._anew:
            probe.forget()
        output = probe.output(
            args, kwargs, training=training, stage=self._stage, device=self.device
        )
        self._require_no_writing(probe, leaves)
        for leaf, placeholder in enumerate(pytree.tree_leaves(output)):
            if isinstance(placeholder, Placeholder) and placeholder.history is None:
                placeholder.history = self._history()
                placeholder.history.output = Value(probe.name, call, True, leaf)
        return replayed(output, probe.module, args, kwargs)

    def _require_no_writing(self, probe: ShapeProbe, leaves: Sequence[Any]) -> None:
        """Raise if a unit changes in place what every stage makes for itself."""
        for place in probe.writes:
            written = leaves[place] if place < len(leaves) else None
            is_made = isinstance(written, torch.Tensor) and not isinstance(written, Placeholder)
            if is_made and id(written) not in self.arguments:
                raise PartitionError(
                    f"{probe.name!r} changes in place a tensor that the forward has made without "
                    "data, and that every stage has; let it return what it adds"
                )

    def finish(self, output: Any, changed: Sequence[Any]) -> None:
        """Check what has been seen, after the last call.

        ``changed`` is what the forward has changed by itself.
        """
        missing = self._layout.cuts[self._stage :]
        if self.refused is not None:
            self.refused.update(missing)
        elif missing:
            raise PartitionError(
                f"the forward of {self._layout.kind.__name__} does not call "
                f"{', '.join(map(repr, missing))}, so no stage can begin there; name "
                "submodules that it calls"
            )
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Placeholder):
                self._bring(leaf, "the output of the model")
        for value in changed:
            # The last stage has the model's own buffers.
            if isinstance(value, Placeholder):
                self._bring(value, "a buffer of the model")
        self.course.beside = [[] for _ in self._layout.cuts]
        for value, (home, last) in sorted(self._needs.items()):
            for stage in range(home, last):
                self.course.beside[stage].append(value)

    def _history(self, parents: Sequence[Placeholder] = ()) -> _History:
        return _History(self._stage, self._now(), parents)

    def _now(self) -> int:
        self._time += 1
        return self._time

    def _begin(self, cut: Cut, args: Args, kwargs: Kwargs) -> None:
        stage = self._layout.cuts.index(cut) + 1
        if self.refused is not None:
            self.refused.update(self._layout.cuts[self._stage : stage - 1])
        elif stage > self._stage + 1:
            raise PartitionError(
                f"the forward calls {cut!r} before {self._layout.cuts[self._stage]!r}; list the "
                "cuts in the order of their calls"
            )
        self.course.opened.update(self.open_checkpoints)
        if self.at_end is not None:
            self.at_end(self._stage)
        crossing: list[Path] = []
        given: list[tuple[int, Placeholder]] = []
        for place, (path, leaf) in enumerate(pytree.tree_flatten_with_path((args, kwargs))[0]):
            if isinstance(leaf, Placeholder) and leaf.stage != ANYWHERE:
                self._bring(leaf, repr(cut))
                crossing.append(path)
                given.append((place, leaf))
        self._stage = stage
        for place, leaf in given:
            if leaf.history is not None:
                leaf.history.place(Value(*cut, False, place), stage, self._now())
        self.course.crossings.append(frozenset(crossing))
        self.course.guessed = list(self.numbers.guessed)
        self.course.is_sized = self.numbers.is_sized
        is_asked = self.course.guessed or self.course.is_sized
        self.course.numbers.append(len(self.numbers) if is_asked else 0)

    def _bring(self, placeholder: Placeholder, user: str) -> None:
        """See to it that the present stage has a value."""
        seen: set[tuple[int, int]] = set()
        needed = [(placeholder, self._now())]
        while needed:
            placeholder, before = needed.pop()
            if (id(placeholder), before) in seen:
                continue
            seen.add((id(placeholder), before))
            history: _History | None = placeholder.history
            if placeholder.owner:
                self.course.units.setdefault(placeholder.owner, set()).add(self._stage)
            elif placeholder.parameter:
                self.course.uses.setdefault(placeholder.maker, set()).add(self._stage)
            elif history is None:
                self._refuse(
                    placeholder.stage,
                    f"{user} in stage {self._stage} uses the data of {placeholder.maker!r}, which "
                    f"only stage {placeholder.stage} has",
                )
            elif (place := history.named(before)) is not None:
                self._cross(place, placeholder)
            elif history.output is not None:
                self._refuse(
                    history.stage,
                    f"{user} in stage {self._stage} uses {history.output} of stage "
                    f"{history.stage}, which the forward has changed in place since; make a new "
                    "tensor instead",
                )
            else:
                if history.is_drawn:
                    self._refuse(
                        history.stage,
                        f"{user} in stage {self._stage} uses a value that the forward has made of "
                        f"{placeholder.maker!r} with random numbers in stage {history.stage}, "
                        "which no other stage can draw again; let a submodule draw them, or cut "
                        "the model elsewhere",
                    )
                needed += [(parent, history.time) for parent in history.parents]

    def _refuse(self, stage: int, why: str) -> None:
        """Refuse all cuts between a stage and the present one, if there are any."""
        if self.refused is not None:
            self.refused.update(self._layout.cuts[stage : self._stage])
        elif stage < self._stage:
            raise PartitionError(why)

    def _cross(self, place: _Place, placeholder: Placeholder) -> None:
        if place.stage < self._stage:
            self._needs[place.value] = place.stage, self._stage
            self.course.looks[place.value] = Absent(tuple(placeholder.shape), placeholder.dtype)
