"""The way of a stage through the forward once more, as its first micro-batch has gone it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taktline import pytree
from taktline.split.example import Args, Call, Kwargs
from taktline.split.named.kind import found_at
from taktline.split.named.layout import Layout
from taktline.split.named.recorded import replayed
from taktline.split.named.script import Coming, Step, is_like
from taktline.split.named.shape_probe import ShapeProbe
from taktline.split.named.stage_run import Given, Leave, StageRun

__all__ = ["RepeatedRun", "Unlike"]


class Unlike(BaseException):
    """Ends a forward that does not go the way of a script, to begin it anew."""


class RepeatedRun(StageRun):
    """A forward that goes the way of a script."""

    repeats = True

    def __init__(self, layout: Layout, stage: int, given: Given) -> None:
        super().__init__(layout, stage, given)
        self._counts = bool(self._kind.sends) or self._layout.is_shared(self._stage)
        self.bare = self._is_in and not self._counts
        self._script: Any = given.kind.script
        self._steps = iter(self._script.steps)

    def before_own(self, unit: Any, args: Args, kwargs: Kwargs) -> Call:
        """Make sure that all values have come where the stage begins."""
        if self._kind.sends:
            self._note_before(unit, args, kwargs)
        if self._is_in:
            return args, kwargs
        if not self._begins(unit) or next(self._steps, None) is not None:
            raise Unlike
        arguments = (args, kwargs)
        for path, value in self._script.places:
            if found_at(arguments, path) is not self._values[value]:
                raise Unlike
        self._is_in = True
        self.bare = not self._counts
        return arguments

    def note_own(self, unit: Any, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Keep what later stages need."""
        if self._counts:
            super().note_own(unit, args, kwargs, output)

    def call_again(self, probe: ShapeProbe, training: bool, args: Args, kwargs: Kwargs) -> Any:
        """What the script has; raises :class:`Leave` where this stage ends."""
        if self._is_in:
            self.require_exit(probe)
            raise Leave(args, kwargs)
        step = next(self._steps, None)
        if step is None or step.who is not probe or step.training is not training:
            raise Unlike
        if self._counts:
            self.count(probe.name)
        if len(args) == 1 and args[0] is step.only and not kwargs:
            return replayed(step.output, probe.module, args, kwargs)
        return replayed(self._played(step, args, kwargs), probe.module, args, kwargs)

    call_foreign = call_again

    def call(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """What the script says; afterwards, whatever there are placeholders for yet."""
        if self._is_in:
            return super().call(func, args, kwargs)
        step = next(self._steps, None)
        if step is None or step.who != func:
            raise Unlike
        return self._played(step, args, kwargs)

    def _played(self, step: Step, args: Args, kwargs: Kwargs) -> Any:
        """The output of a step, if these are its arguments."""
        values = self._values
        if not is_like(step.args, args, values) or (
            (kwargs or step.kwargs) and not is_like(step.kwargs, kwargs, values)
        ):
            raise Unlike
        if step.makes is None:
            return super().call(step.who, args, kwargs) if step.runs else step.output
        parts, tree = step.makes
        parts = [values[part.value] if type(part) is Coming else part for part in parts]
        return parts[0] if tree.is_leaf() else pytree.tree_unflatten(parts, tree)
