"""A run of a stage like an earlier one, which repeats the forward before the stage begins.

::

    forward of the model:   embed   + position   layer 0   layer 1   layer 2   layer 3
    stage 1 of 3, first:    (…)     (…)          (…)       ▶ runs    runs      ▶ leave
    stage 1 of 3, later:    (…)     (…)          value     ▶ bare    bare      ▶ leave

(…) are placeholders. The forward runs in each call, so it takes each decision again. But the first
run has recorded its prefix: a later run gets recorded placeholders from units of other stages and
from operations, and the values from the stage before instead of their placeholders. From there on,
the forward sees real tensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from taktline import pytree
from taktline.split.arguments import Args, Call, Kwargs
from taktline.split.named.known_calls import cache_key, leaf_at, tensor_key
from taktline.split.named.layout import Layout
from taktline.split.named.mutable import is_constant
from taktline.split.named.placeholder import Placeholder
from taktline.split.named.shape_probe import ShapeProbe
from taktline.split.named.side_effects import FullOutput, apply_side_effects
from taktline.split.named.stage_run import StageInput, StageRun

_NOTHING = object()
_COMPUTED = object()
"""Replaces a tensor with data in the recorded output of a function, which each call computes."""


class Step(NamedTuple):
    """A call of a unit of another stage, or of a function of torch with placeholders."""

    called: Any
    training: bool | None
    """The mode of a unit; None for a function."""
    args: Args
    """In a prefix: the placeholders among the arguments, without received ones."""
    kwargs: Kwargs
    output: Any
    key: Any = None
    """What the arguments of a later call must be like; see :func:`_key`."""
    makes: tuple[tuple[Any, ...], pytree.TreeSpec] | None = None
    """The leaves of the output, if it must be built in each call."""
    runs: bool = False
    """Whether the output has data, so that the function must run in each call."""
    only: object = _NOTHING
    """The only argument, if comparing it by identity is enough."""


_Tensor: Any = torch.Tensor
_ABOUT_GRADIENTS = (
    _Tensor.requires_grad.__get__,
    _Tensor.grad_fn.__get__,
    _Tensor.is_leaf.__get__,
    _Tensor.retains_grad.__get__,
)
"""Attributes in which a placeholder differs from the value that replaces it."""


class Prefix(NamedTuple):
    """The steps before a stage begins."""

    steps: tuple[Step, ...]
    places: tuple[tuple[tuple[Any, ...], int], ...]
    """The paths, among the arguments with which the stage begins, of the received values."""


class _Received(NamedTuple):
    """Replaces the placeholder of a value that comes from the stage before."""

    value: int


def record_prefix(
    seen: Iterable[Step], received: Mapping[int, int], places: Sequence[tuple[tuple[Any, ...], int]]
) -> Prefix | None:
    """The prefix of a stage that begins with received values in these places.

    ``received`` are the numbers of values, by the ids of their placeholders or of themselves.
    Returns None if there can be no prefix: each received value must be the output of a step, and no
    operation before the stage may use its placeholder, as it would then run on real data.
    """
    outputs: set[int] = set()
    steps: list[Step] = []
    for step in seen:
        leaves = pytree.tree_leaves((step.args, step.kwargs))
        given = [id(leaf) in received for leaf in leaves if isinstance(leaf, Placeholder)]
        parts = pytree.tree_leaves(step.output)
        if step.training is None and any(given):
            has_tensors = any(isinstance(part, torch.Tensor) for part in parts)
            if step.called in _ABOUT_GRADIENTS or has_tensors or not all(given):
                return None
            continue  # later calls have no placeholders there
        recorded = _recorded(step, received)
        if recorded.training is not None and (
            recorded.runs or not all(isinstance(x, torch.Tensor) or is_constant(x) for x in parts)
        ):
            return None
        steps.append(recorded)
        outputs.update(map(id, parts))
    return Prefix(tuple(steps), tuple(places)) if received.keys() <= outputs else None


def _recorded(step: Step, received: Mapping[int, int]) -> Step:
    """A step to compare with."""
    parts, tree = pytree.tree_flatten(step.output)

    def part_of(part: Any) -> Any:
        if id(part) in received:
            return _Received(received[id(part)])
        has_data = isinstance(part, torch.Tensor) and not isinstance(part, Placeholder)
        return _COMPUTED if has_data else part

    made = tuple(map(part_of, parts))
    runs = any(part is _COMPUTED for part in made)
    is_full = type(step.output) is FullOutput
    output = step.output.output if is_full else step.output
    is_built = (
        not (isinstance(output, torch.Tensor) or type(output) is tuple)
        or (is_full and step.output.arguments)
        or any(type(part) is _Received for part in made)
        or (runs and any(part is not _COMPUTED for part in made))
    )
    leaves = pytree.tree_leaves((step.args, step.kwargs))
    kept = [x for x in leaves if isinstance(x, Placeholder) and id(x) not in received]
    is_simple = len(step.args) == 1 and not step.kwargs and kept and kept[0] is step.args[0]
    return step._replace(
        args=tuple(kept),
        kwargs={},
        output=None if runs or is_built else step.output,
        key=_key((step.args, step.kwargs), received),
        makes=(made, tree) if is_built else None,
        runs=runs,
        only=kept[0] if is_simple and not (is_built or runs) else _NOTHING,
    )


def _key(arguments: Any, received: Mapping[int, int]) -> Any:
    """All that must be the same in a later call: which values and placeholders, and shapes."""

    def of_tensor(tensor: torch.Tensor) -> Any:
        if id(tensor) in received:
            return received[id(tensor)]
        return (id(tensor),) if type(tensor) is Placeholder else tensor_key(tensor)

    return cache_key(arguments, of_tensor)


class Differs(BaseException):
    """Ends a forward that differs from its prefix, so that it begins again without one."""


class RepeatedRun(StageRun):
    """A forward that repeats a prefix."""

    def __init__(self, layout: Layout, stage: int, given: StageInput) -> None:
        super().__init__(layout, stage, given)
        ends = (self._start, self._end)
        is_shared = any(cut is not None and layout.is_shared(cut.unit) for cut in ends)
        self._counts = bool(self._known.exit.extras) or is_shared
        self.bare = self._has_begun and not self._counts
        self._prefix: Any = given.known.prefix
        self._steps = iter(self._prefix.steps)
        self._numbers = {id(value): number for number, value in enumerate(self._values)}

    def before_own(self, unit: Any, args: Args, kwargs: Kwargs) -> Call:
        """Check that all values are in their places where the stage begins."""
        if self._known.exit.extras:
            self._note_before(unit, args, kwargs)
        if self._has_begun:
            return args, kwargs
        if not self._is_at(self._start, unit) or next(self._steps, None) is not None:
            raise Differs
        arguments = (args, kwargs)
        for path, value in self._prefix.places:
            if leaf_at(arguments, path) is not self._values[value]:
                raise Differs
        self._has_begun = True
        self.bare = not self._counts
        return arguments

    def note_own(self, unit: Any, args: Args, kwargs: Kwargs, output: Any) -> None:
        if self._counts:
            super().note_own(unit, args, kwargs, output)

    def call_foreign(self, probe: ShapeProbe, training: bool, args: Args, kwargs: Kwargs) -> Any:
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
        if _key((args, kwargs), self._numbers) != step.key:
            raise Differs
        if step.makes is None:
            return super().call(step.called, args, kwargs) if step.runs else step.output
        parts, tree = step.makes
        if step.runs:
            computed = pytree.tree_leaves(super().call(step.called, args, kwargs))
            pairs = zip(parts, computed, strict=True)
            parts = [new if part is _COMPUTED else part for part, new in pairs]
        parts = [self._values[part.value] if type(part) is _Received else part for part in parts]
        return parts[0] if tree.is_leaf() else pytree.tree_unflatten(parts, tree)
