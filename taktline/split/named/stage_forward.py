"""What a piece that was cut by names does beside its modules: takes part, and hands on.

The first call of a kind goes through the model's forward with placeholders (:mod:`stage_run`). It
leaves a script, with which others of its kind go through it quickly (:mod:`script`), and for a
plain forward a program, with which they need not (:mod:`program`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.example import Args, Call, Kwargs
from taktline.split.named import program
from taktline.split.named.changes import Changes
from taktline.split.named.course import Course
from taktline.split.named.first_run import FirstRun, OtherTypes
from taktline.split.named.kind import Kind
from taktline.split.named.layout import Layout
from taktline.split.named.looks import Recent, autocast_of, look
from taktline.split.named.mutable import copies
from taktline.split.named.of_transformers import require_not_collected, without_cache
from taktline.split.named.placeholder import Absent, Placeholder
from taktline.split.named.plain import guards_of
from taktline.split.named.repeated_run import RepeatedRun, Unlike
from taktline.split.named.replacement import is_own_unit
from taktline.split.named.stage_run import Given, Leave, StageRun
from taktline.split.named.walk import device_of, walk
from taktline.split.named.watch import inner_of, watching
from taktline.stage.names import unwrapped

__all__ = ["StageForward", "crossings_of", "has_dynamic_shapes"]

_BY_HAND = "cut the model by hand, or with taktline.pipeline, which traces it"
_UNKNOWN = object()
"""In the place of an output that is not known how to be made."""


def crossings_of(piece: nn.Module) -> list[str]:
    """What a piece hands to the next stage beside the model's arguments, as an example has shown.

    Nothing for other modules, or if no call was seen yet.
    """
    forward: StageForward | None = vars(piece).get("_stage_forward")
    if forward is None or forward.layout.course is None or forward._is_last:
        return []
    course, stage = forward.layout.course, forward.stage
    return [
        *([f"{forward.layout.cuts[stage]} (an argument)"] * len(course.crossings[stage])),
        *map(str, course.beside[stage]),
        *(["numbers that the forward asks for"] if course.numbers[stage] else []),
    ]


def has_dynamic_shapes(piece: nn.Module) -> bool:
    """Whether the shapes of what crosses boundaries depend on data, as an example has shown."""
    forward: StageForward | None = vars(piece).get("_stage_forward")
    course = None if forward is None else forward.layout.course
    return course is not None and course.is_sized


def _crossing(course: Course) -> Any:
    return course.crossings, [set(values) for values in course.beside], course.numbers


@dataclass(eq=False, slots=True)
class StageForward:
    """One stage of a model, and what it has learned of calls."""

    layout: Layout
    stage: int
    _known: Recent[Kind] = field(default_factory=Recent)
    _types: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    """Types that other stages are known to return instead of those that their submodules have."""
    _changes: Changes | None = None
    """What the forward changes by itself."""
    _changed: frozenset[str] = frozenset()
    """The names of that."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StageForward:
        return StageForward(self.layout, self.stage)  # what is known is of these very modules

    def run(
        self,
        piece: nn.Module,
        forward: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """The forward of this stage: what the next one needs, or the model's output."""
        values, came = self._received(args, kwargs)
        device = values[0].device if values else device_of(came)
        modes = torch._C._len_torch_dispatch_stack()
        key = (
            look(values),
            look(came),
            piece.training,
            torch.is_grad_enabled(),
            autocast_of(device),
            device,
            self.layout.retyped,
            modes,
        )
        # Taken out meanwhile: a script is for one call at a time.
        kind = self._known.pop(key, None)
        if kind is None:
            if not modes:
                self.layout.follow(piece)
            kind = self._learn(came, device, is_measured=modes > 0)
            kind.is_open &= not modes  # in which tensors may have no data, or operations be counted
        if not modes and not kind.changed <= self._changed:
            self._have_own(piece, kind.changed)
        # Of a run without data nothing is to stay.
        changes = Changes(self.layout.all_of(piece)) if modes else self._changes
        if changes is not None:
            changes.keep()
        made: Sequence[torch.Tensor] = ()
        if kind.changes is not False and any(value.requires_grad for value in values):
            values, made = copies(values)
        given = Given(values, came, device, kind)
        try:
            output = self._again(given, forward)
            if output is _UNKNOWN:
                output = self._first(given, piece, forward)
        finally:
            self._known.keep(key, kind)
            if modes and changes is not None:
                changes.undo()
        if changes is not None and not modes:
            changes.settle()
        if made:
            kind.changes = any(copy._version for copy in made)
        return output

    def _again(self, given: Given, forward: Callable[..., Any]) -> Any:
        """Do as in a call before; or report that there is none to follow."""
        kind = given.kind
        if kind.program is not None:
            if kind.program.guards.hold():
                output = kind.program.run(given.values)
                return output[0] if self._is_last else kind.handed_on(output, given.came)
            kind.program = None
        if kind.script is not None:
            try:
                return self._pass(RepeatedRun(self.layout, self.stage, given), forward)
            except Unlike:
                if self._changes is not None:
                    self._changes.undo()
        return _UNKNOWN

    def _first(self, given: Given, piece: nn.Module, forward: Callable[..., Any]) -> Any:
        """Go through the forward with placeholders, and note what may help others of its kind."""
        kind, versions = given.kind, program.versions_of(given.values)
        units = {name: piece.get_submodule(name) for name in self.layout.probes}
        # Not of what was put around a unit since: that calls what it likes.
        own = {name: module for name, module in units.items() if is_own_unit(module)}
        # What is compiled is not to be watched: its code would be made for that.
        is_compiled = any(
            module._compiled_call_impl or unwrapped(module) is not module
            for module in units.values()
        )
        inner = {} if is_compiled else {**self.layout.inner, **inner_of(own)}
        changes = Changes(self.layout.all_of(piece))
        changes.keep()
        tries = 0
        while True:  # with the types that are known, with none, and whatever they are
            tries += 1
            run = FirstRun(self.layout, self.stage, given, types=self._types, last=tries == 3)
            try:
                with watching(run, inner) if inner else nullcontext():
                    output = self._pass(run, forward)
                break
            except OtherTypes as other:
                self._types = other.types
                changes.undo()
        kind.script = run.script
        kind.is_open = kind.script is not None
        if not kind.is_checked:
            kind.is_checked = True
            changed = self.layout.common_in(changes.changed())
            is_watched = bool(inner) or not self.layout.inner
            self._require_like(kind, run.order, changed, is_watched=is_watched)
            if run.seen is not None:
                kind.program = self._program(piece, run.seen, given, versions, output)
        return output

    def _program(
        self,
        piece: nn.Module,
        seen: Sequence[program.Seen],
        given: Given,
        versions: Mapping[int, int],
        output: Any,
    ) -> program.Program | None:
        """What to do without the forward in later calls, if that is plain."""
        layout = self.layout
        containers = {name: piece.get_submodule(name) for name in sorted(layout.containers)}
        guards = guards_of(layout.kind, containers, layout.probes, layout.hooked)
        if guards is None:
            return None
        returned = [output] if self._is_last else output[0]
        places = list(containers.values())
        return program.written(seen, given.values, versions, returned, guards, places)

    def _pass(self, run: StageRun, forward: Callable[..., Any]) -> Any:
        kind, came = run.given.kind, run.given.came
        args, kwargs = kind.call(came)
        with run:
            try:
                output = forward(*args, **kwargs)
            except Leave as leave:
                beside = run.beside() if kind.sends or kind.asks else ()
                return kind.packed(leave.arguments, beside, came, run.require_handed_on)
        return run.finish(output)

    @property
    def _is_last(self) -> bool:
        return self.stage == self.layout.stages - 1

    def _received(self, args: Args, kwargs: Kwargs) -> tuple[tuple[Any, ...], Call]:
        """What came from the stage before, and what the model was called with."""
        if self.stage == 0:
            return (), (args, without_cache(self.layout.arguments[len(args) :], kwargs))
        if len(args) != 3 or not isinstance(args[0], tuple):
            raise PartitionError(
                f"stage {self.stage} takes what stage {self.stage - 1} returns, not the arguments "
                "of the model: those go to stage 0"
            )
        # Keywords of a rank reach all its stages; the model's have come with the rest.
        return args[0], (args[1], args[2])

    def _learn(self, came: Call, device: torch.device, *, is_measured: bool) -> Kind:
        """What such a call hands on; found out once.

        ``is_measured`` is whether it runs without data, or to be counted, most likely the example.
        """
        kind = Kind.of(came, device)
        call = kind.call(came)
        require_not_collected(self.layout.empty_model, call[1])
        whole = self.layout
        if is_measured and whole.course is not None and whole.example == look(call):
            course = whole.course
        else:
            course = walk(whole, *call, thorough=True)
            whole.course = whole.course or course
        self._require_at_home(course)
        if not self._is_last:
            leaves, spec = pytree.tree_flatten(call)
            kind.needed = tuple(
                isinstance(leaf, torch.Tensor)
                and not isinstance(leaf, Placeholder)
                # What is whole numbers is small, and may be what other micro-batches depend on.
                and (not leaf.is_floating_point() or self._is_missed(leaves, place, spec, course))
                for place, leaf in enumerate(leaves)
            )
        kind.follow(course, self.stage)
        return kind

    def _have_own(self, piece: nn.Module, changed: frozenset[str]) -> None:
        """Have of this stage alone what each stage changes."""
        if not self._is_last:
            self.layout.separate(piece, changed - self._changed)
            Changes(self.layout.common_of(piece), changed - self._changed).separate()
        self._changed |= changed
        self._changes = Changes(self.layout.common_of(piece), self._changed)

    def _require_like(
        self, kind: Kind, order: Sequence[str], changed: frozenset[str], *, is_watched: bool
    ) -> None:
        """Raise if a stage has not done what the forward of the whole model does up to its end."""
        missing = kind.changed - changed if self._is_last and not kind.is_guessed else set()
        for name in sorted(missing | (changed - kind.changed)):
            raise PartitionError(
                f"stage {self.stage} changes {name!r} otherwise than the whole model; {_BY_HAND}"
            )
        expects = kind.order
        if expects is not None and not is_watched:
            expects = tuple(name for name in expects if name in self.layout.probes)
        if expects is None or tuple(order) == expects:
            return
        pairs = zip_longest(order, expects)
        found, expected = next(pair for pair in pairs if pair[0] != pair[1])
        raise PartitionError(
            f"the forward of stage {self.stage} calls {found or 'nothing'!r} where that of the "
            f"whole model calls {expected or 'nothing'!r}, so something would be left out; "
            f"{_BY_HAND}"
        )

    def _is_missed(
        self, leaves: list[Any], place: int, spec: pytree.TreeSpec, course: Course
    ) -> bool:
        """Whether later stages miss an argument: try and see."""
        if course.is_guessed:
            return True  # which would take many tries
        leaf = leaves[place]
        placeholder = Absent(tuple(leaf.shape), leaf.dtype).as_placeholder(leaf.device)
        args, kwargs = pytree.tree_unflatten(
            [*leaves[:place], placeholder, *leaves[place + 1 :]], spec
        )
        try:
            without = walk(self.layout, args, kwargs)
        except Exception:
            return True  # somebody looks at its data
        return _crossing(without) != _crossing(course)

    def _require_at_home(self, course: Course) -> None:
        """Raise if a unit or parameter is used in another stage than that which has it."""
        text = self.layout.advice
        for name in {**course.calls, **course.units}:
            stages = course.calls.get(name, ())
            homes = self.layout.homes[name]
            away = {*stages, *course.units.get(name, ())} - homes
            if away:
                raise PartitionError(
                    f"the forward calls {name!r} in stage {min(away)}, but it lies in stage "
                    f"{min(homes)}; {text}"
                )
        for name, used in course.uses.items():
            away = used - self.layout.users[name]
            if away:
                raise PartitionError(
                    f"the forward uses the parameter {name!r} in stage {min(away)}, but it lies in "
                    f"stage {min(self.layout.users[name])}; {text}"
                )
