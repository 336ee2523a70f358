"""A dry run's record of where values come from, and which of them must cross which cut.

A stage begins with a unit, and gets the arguments of that. Other tensors of earlier stages that it
uses cross, too: outputs and arguments of units by their names. A tensor that the forward itself has
computed from these does not cross: the stage that uses it computes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.arguments import Args, Kwargs
from taktline.split.named.checkpoints import Checkpoints
from taktline.split.named.data_dependent import Guess, Numbers
from taktline.split.named.forward_summary import Boundary, Cut, ForwardSummary, Path, UnitTensor
from taktline.split.named.layout import Layout
from taktline.split.named.placeholder import ANYWHERE, Absent, Placeholder
from taktline.split.named.shape_probe import ShapeProbe
from taktline.split.named.side_effects import apply_side_effects


class _Place(NamedTuple):
    """A placeholder as an argument or output of a unit."""

    value: UnitTensor
    stage: int
    time: int


@dataclass(slots=True, eq=False)
class _Memory:
    """The data of a placeholder and of all its views."""

    written: int = 0
    """When it was last changed in place."""
    parents: Sequence[Placeholder] = ()
    """The other placeholders among the arguments of the operations that changed it."""
    is_drawn: bool = False
    """Whether one of them draws random numbers."""
    writer: tuple[str, int] | None = None
    """The last unit that changed it, and the stage of that call."""


@dataclass(slots=True, eq=False)
class _History:
    """How a placeholder was made."""

    stage: int
    time: int
    parents: Sequence[Placeholder] = ()
    """The placeholders among the arguments of the operation that returned it."""
    is_drawn: bool = False
    """Whether that operation draws random numbers."""
    memory: _Memory = field(default_factory=_Memory)
    output: UnitTensor | None = None
    """Which output of a unit it is, if it is one."""
    places: list[_Place] = field(default_factory=list)
    """The first unit of each stage that gets it as an argument."""

    def named(self, before: int) -> _Place | None:
        """The argument or output of a unit that had this value before a time."""
        written = self.memory.written
        found = [place for place in self.places if written <= place.time < before]
        if self.output is not None and not written:
            found.insert(0, _Place(self.output, self.stage, self.time))
        # The first in the last stage that has the value.
        return next((place for place in found if place.stage == found[-1].stage), None)

    def add_place(self, value: UnitTensor, stage: int, time: int) -> None:
        """Note that a unit gets it as an argument."""
        last = self.places[-1] if self.places else None
        if last is None or last.stage < stage or last.time < self.memory.written:
            self.places.append(_Place(value, stage, time))


class DryRunContext(Checkpoints):
    """A forward in which all units are foreign, and the stage that it has come to.

    ``reruns`` is whether every call of a unit runs, even if it is like an earlier one. ``refused``
    gets the cuts that are impossible; without it, they raise an error. ``at_end`` is called where a
    stage ends.
    """

    def __init__(
        self,
        summary: ForwardSummary,
        layout: Layout,
        device: torch.device,
        *,
        guess: Guess,
        reruns: bool = False,
        refused: set[Cut] | None = None,
        at_end: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(device)
        self.refused = refused
        self.at_end = at_end
        self.arguments: set[int] = set()
        """The ids of the model's arguments."""
        self.written_by_units: dict[int, str] = {}
        """The units that change arguments of the model in place, by the ids of these."""
        self.summary = summary
        self.numbers = Numbers(self, guess=guess)
        self._layout = layout
        self._reruns = reruns
        self._stage = 0
        self._time = 1
        self._needs: dict[UnitTensor, tuple[int, int]] = {}
        """For values that cross: the stage that has it, and the last that needs it."""

    def source(self, placeholders: Sequence[Placeholder]) -> Placeholder:
        """A placeholder that a stage has made, if there is one."""
        for placeholder in placeholders:
            if placeholder.owner in self._layout.direct:
                self._note_use(placeholder.owner)
        return min(placeholders, key=lambda placeholder: placeholder.stage)

    def note_made(self, made: Placeholder, placeholders: Sequence[Placeholder], func: Any) -> None:
        """Note how a placeholder was made."""
        made.history = self._history(tuple(placeholders))
        made.history.is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        of = placeholders[0].history
        if of is not None and any(part.alias_info is not None for part in func._schema.returns):
            made.history.memory = of.memory

    def note_written(
        self, placeholder: Placeholder, placeholders: Sequence[Placeholder], func: Any
    ) -> None:
        """Note that a placeholder, and all that share its data, were changed in place."""
        history: _History | None = placeholder.history
        if history is not None:
            memory = history.memory
            memory.written = self._now()
            memory.is_drawn |= torch.Tag.nondeterministic_seeded in func.tags
            others = (other for other in placeholders if other is not placeholder)
            memory.parents = (*memory.parents, *others)

    def note_asked(self, placeholder: Placeholder) -> None:
        """Let a stage that reads a number have the data."""
        self._bring(placeholder, "the forward")

    def is_open(self, checkpoint: int) -> bool:
        """True: there is no data to keep."""
        return True

    def note_inner(self, name: str) -> None:
        """Note a call of a module inside of a unit."""
        self.summary.order.append((name, self._stage))

    def call_foreign(self, probe: ShapeProbe, training: bool, args: Args, kwargs: Kwargs) -> Any:
        """Note a call of a unit, and return placeholders."""
        leaves = pytree.tree_leaves((args, kwargs))
        placeholders = [(place, x) for place, x in enumerate(leaves) if isinstance(x, Placeholder)]
        calls = self.summary.calls.setdefault(probe.name, [])
        call = len(calls)
        if (probe.name, call) in self._layout.cuts:
            self._begin(Cut(probe.name, call), args, kwargs)
        calls.append(self._stage)
        self.summary.order.append((probe.name, self._stage))
        for place, placeholder in placeholders:
            self._bring(placeholder, repr(probe.name))
            if placeholder.history is not None:
                placeholder.history.add_place(
                    UnitTensor(probe.name, call, False, place), self._stage, self._now()
                )
        if self._reruns:
            probe.forget()
        output = probe.output(
            args, kwargs, training=training, stage=self._stage, device=self.device
        )
        self._require_no_writing(probe, leaves)
        for place, placeholder in placeholders:
            if place in probe.writes and placeholder.history is not None:
                memory = placeholder.history.memory
                memory.written, memory.writer = self._now(), (probe.name, self._stage)
                placeholder.history.add_place(
                    UnitTensor(probe.name, call, False, place), self._stage, self._now()
                )
        for leaf, placeholder in enumerate(pytree.tree_leaves(output)):
            if isinstance(placeholder, Placeholder) and placeholder.history is None:
                placeholder.history = self._history()
                placeholder.history.output = UnitTensor(probe.name, call, True, leaf)
        return apply_side_effects(output, probe.module, args, kwargs)

    def _require_no_writing(self, probe: ShapeProbe, leaves: Sequence[Any]) -> None:
        """Raise if a unit changes in place a tensor that every stage computes."""
        for place in probe.writes:
            written = leaves[place] if place < len(leaves) else None
            is_made = isinstance(written, torch.Tensor) and not isinstance(written, Placeholder)
            if is_made and id(written) in self.arguments:
                self.written_by_units[id(written)] = probe.name
            elif is_made:
                raise PartitionError(
                    f"{probe.name!r} changes in place a tensor that the forward has made without "
                    "data, and that every stage has; return a new tensor instead"
                )

    def finish(self, output: Any, changed: Sequence[Any]) -> None:
        """Complete the summary after the forward has ended.

        ``changed`` are the values that the forward has put into attributes and buffers.
        """
        missing = self._layout.cuts[self._stage :]
        if self.refused is not None:
            self.refused.update(missing)
        elif missing:
            raise PartitionError(
                f"the forward of {self._layout.model_class.__name__} does not call "
                f"{', '.join(map(repr, missing))}, so no stage can begin there; name "
                "submodules that it calls"
            )
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Placeholder):
                self._bring(leaf, "the output of the model")
        for value in changed:
            if isinstance(value, Placeholder):
                self._bring(value, "a buffer of the model")
        for value, (home, last) in sorted(self._needs.items()):
            for boundary in self.summary.boundaries[home:last]:
                boundary.extras.append(value)

    def _note_use(self, owner: str) -> None:
        self.summary.uses.setdefault(owner, set()).add(self._stage)

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
        self.summary.opened.update(self.open_checkpoints)
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
                leaf.history.add_place(UnitTensor(*cut, False, place), stage, self._now())
        self.summary.guessed = list(self.numbers.guessed)
        self.summary.is_sized = self.numbers.is_sized
        is_guessed = self.summary.guessed or self.summary.is_sized
        numbers = len(self.numbers) if is_guessed else 0
        self.summary.boundaries.append(Boundary(frozenset(crossing), numbers=numbers))

    def _bring(self, placeholder: Placeholder, user: str) -> None:
        """Let the present stage have a value: note what must cross for that."""
        seen: set[tuple[int, int]] = set()
        needed = [(placeholder, self._now())]
        while needed:
            placeholder, before = needed.pop()
            if (id(placeholder), before) in seen:
                continue
            seen.add((id(placeholder), before))
            history: _History | None = placeholder.history
            if placeholder.owner:
                self._note_use(placeholder.owner)
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
                if history.memory.writer is not None:
                    unit, stage = history.memory.writer
                    self._refuse(
                        stage,
                        f"{user} in stage {self._stage} uses a value that {unit!r} has changed in "
                        f"place in stage {stage}, which no other stage can do again; return a new "
                        "tensor there, or cut the model elsewhere",
                    )
                if history.is_drawn or history.memory.is_drawn:
                    self._refuse(
                        history.stage,
                        f"{user} in stage {self._stage} uses a value that the forward has made "
                        f"from {placeholder.maker!r} with random numbers in stage {history.stage}, "
                        "which no other stage can draw again; draw them in a submodule, or cut the "
                        "model elsewhere",
                    )
                parents = (*history.parents, *history.memory.parents)
                needed += [(parent, history.time) for parent in parents]

    def _refuse(self, stage: int, why: str) -> None:
        """Refuse the cuts between a stage and the present one."""
        if self.refused is not None:
            self.refused.update(self._layout.cuts[stage : self._stage])
        elif stage < self._stage:
            raise PartitionError(why)

    def _cross(self, place: _Place, placeholder: Placeholder) -> None:
        if place.stage < self._stage:
            self._needs[place.value] = place.stage, self._stage
            self.summary.shapes[place.value] = Absent(tuple(placeholder.shape), placeholder.dtype)
