"""A run of a stage like an earlier one, whose prefix it repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taktline import pytree
from taktline.split.arguments import Args, Call, Kwargs
from taktline.split.named.known_call import leaf_at
from taktline.split.named.layout import Layout
from taktline.split.named.prefix import Received, Step, matches
from taktline.split.named.shape_probe import ShapeProbe
from taktline.split.named.side_effects import apply_side_effects
from taktline.split.named.stage_run import StageInput, StageRun

__all__ = ["Differs", "RepeatedRun"]


class Differs(BaseException):
    """Ends a forward that differs from its prefix, so that it begins again without one."""


class RepeatedRun(StageRun):
    """A forward that repeats a prefix."""

    repeats = True

    def __init__(self, layout: Layout, stage: int, given: StageInput) -> None:
        super().__init__(layout, stage, given)
        self._counts = bool(self._known.exit.extras) or self._layout.is_shared(self._stage)
        self.bare = self._has_begun and not self._counts
        self._prefix: Any = given.known.prefix
        self._steps = iter(self._prefix.steps)

    def before_own(self, unit: Any, args: Args, kwargs: Kwargs) -> Call:
        """Check that all values are in their places where the stage begins."""
        if self._known.exit.extras:
            self._note_before(unit, args, kwargs)
        if self._has_begun:
            return args, kwargs
        if not self._begins(unit) or next(self._steps, None) is not None:
            raise Differs
        arguments = (args, kwargs)
        for path, value in self._prefix.places:
            if leaf_at(arguments, path) is not self._values[value]:
                raise Differs
        self._has_begun = True
        self.bare = not self._counts
        return arguments

    def note_own(self, unit: Any, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Keep the arguments and outputs of an own unit that later stages need."""
        if self._counts:
            super().note_own(unit, args, kwargs, output)

    def call_again(self, probe: ShapeProbe, training: bool, args: Args, kwargs: Kwargs) -> Any:
        """The recorded output of a foreign unit; raises ``Leave`` where this stage ends."""
        if self._has_begun:
            raise self.leave(probe, args, kwargs)
        step = next(self._steps, None)
        if step is None or step.called is not probe or step.training is not training:
            raise Differs
        if self._counts:
            self.count(probe.name)
        is_simple = len(args) == 1 and args[0] is step.only and not kwargs
        output = step.output if is_simple else self._output(step, args, kwargs)
        return apply_side_effects(output, probe.module, args, kwargs)

    call_foreign = call_again

    def call(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """The recorded result of a function of torch, until the stage begins."""
        if self._has_begun:
            return super().call(func, args, kwargs)
        step = next(self._steps, None)
        if step is None or step.called != func:
            raise Differs
        return self._output(step, args, kwargs)

    def _output(self, step: Step, args: Args, kwargs: Kwargs) -> Any:
        """The output of a step, if the arguments match."""
        values = self._values
        if not matches(step.args, args, values) or (
            (kwargs or step.kwargs) and not matches(step.kwargs, kwargs, values)
        ):
            raise Differs
        if step.makes is None:
            return super().call(step.called, args, kwargs) if step.runs else step.output
        parts, tree = step.makes
        parts = [values[part.value] if type(part) is Received else part for part in parts]
        return parts[0] if tree.is_leaf() else pytree.tree_unflatten(parts, tree)
