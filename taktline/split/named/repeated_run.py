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
from taktline.split.named.known_calls import leaf_at
from taktline.split.named.layout import Layout
from taktline.split.named.mutable import is_constant
from taktline.split.named.placeholder import Placeholder
from taktline.split.named.shape_probe import ShapeProbe
from taktline.split.named.side_effects import FullOutput, apply_side_effects
from taktline.split.named.stage_run import StageInput, StageRun

__all__ = ["Differs", "Prefix", "RepeatedRun", "Step", "record_prefix"]

_NOTHING = object()


class Step(NamedTuple):
    """A call of a unit of another stage, or of a function of torch with placeholders."""

    called: Any
    training: bool | None
    """The mode of a unit; None for a function."""
    args: Args
    """In a prefix: the recorded placeholders, and a :class:`_TensorLike` for each real tensor."""
    kwargs: Kwargs
    output: Any
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


class _TensorLike(NamedTuple):
    """A real tensor with this shape."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _ObjectOf(NamedTuple):
    """Any object of this class."""

    kind: type


class _CannotRecord(Exception):
    """A later call could not recognise the step."""


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
        try:
            recorded = _recorded(step, received)
        except _CannotRecord:
            return None
        if recorded is not None:
            steps.append(recorded)
            outputs.update(id(part) for part in pytree.tree_leaves(step.output))
    if not received.keys() <= outputs:
        return None
    return Prefix(tuple(steps), tuple(places))


def _recorded(step: Step, received: Mapping[int, int]) -> Step | None:
    """A step to compare with; None if later calls skip it, as they have no placeholders there."""
    parts, tree = pytree.tree_flatten(step.output)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    runs = any(not isinstance(part, Placeholder) and id(part) not in received for part in tensors)
    if step.training is None:
        leaves = pytree.tree_leaves((step.args, step.kwargs))
        given = [id(part) in received for part in leaves if isinstance(part, Placeholder)]
        if any(given):
            if step.called in _ABOUT_GRADIENTS or tensors or not all(given):
                raise _CannotRecord
            return None
    elif runs or not all(isinstance(part, torch.Tensor) or is_constant(part) for part in parts):
        raise _CannotRecord
    made = tuple(_Received(received[id(part)]) if id(part) in received else part for part in parts)
    is_full = type(step.output) is FullOutput
    output = step.output.output if is_full else step.output
    is_built = (
        not (isinstance(output, torch.Tensor) or type(output) is tuple)
        or (is_full and step.output.arguments)
        or any(type(part) is _Received for part in made)
    )
    args, kwargs = _pattern(step.args, received), _pattern(step.kwargs, received)
    is_simple = len(args) == 1 and isinstance(args[0], Placeholder)
    return step._replace(
        args=args,
        kwargs=kwargs,
        output=None if runs or is_built else step.output,
        makes=(made, tree) if is_built else None,
        runs=runs,
        only=args[0] if is_simple and not (kwargs or is_built or runs) else _NOTHING,
    )


def _pattern(value: Any, received: Mapping[int, int]) -> Any:
    """The pattern that an argument of a later call must match."""
    if isinstance(value, Placeholder):
        return _Received(received[id(value)]) if id(value) in received else value
    if isinstance(value, torch.Tensor):
        return _TensorLike(value.shape, value.stride(), value.dtype)
    if type(value) in (tuple, list):
        return type(value)(_pattern(part, received) for part in value)
    if type(value) is dict:
        return {key: _pattern(part, received) for key, part in value.items()}
    if is_constant(value) or isinstance(value, (torch.Size, slice, type(...))):
        return value
    if not pytree.tree_structure(value).is_leaf():
        raise _CannotRecord
    return _ObjectOf(type(value))


def _matches(pattern: Any, found: Any, values: Sequence[Any]) -> bool:
    """Whether an argument matches; ``values`` come from the stage before."""
    if found is pattern:
        return True
    kind = type(pattern)
    if kind is Placeholder:
        return False
    if kind is _Received:
        return found is values[pattern.value]
    if kind is _TensorLike:
        return (
            isinstance(found, torch.Tensor)
            and type(found) is not Placeholder
            and found.shape == pattern.shape
            and found.dtype is pattern.dtype
            and found.stride() == pattern.stride
        )
    if kind is _ObjectOf:
        return type(found) is pattern.kind
    if type(found) is not kind:
        return False
    if kind is dict:
        return pattern.keys() == found.keys() and _all_match(
            pattern.values(), map(found.__getitem__, pattern), values
        )
    if kind is tuple or kind is list:
        return len(pattern) == len(found) and _all_match(pattern, found, values)
    return pattern == found


def _all_match(patterns: Iterable[Any], found: Iterable[Any], values: Sequence[Any]) -> bool:
    for one, other in zip(patterns, found, strict=True):
        if one is not other and not _matches(one, other, values):
            return False
    return True


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
        if not _matches(step.args, args, values) or (
            (kwargs or step.kwargs) and not _matches(step.kwargs, kwargs, values)
        ):
            raise Differs
        if step.makes is None:
            return super().call(step.called, args, kwargs) if step.runs else step.output
        parts, tree = step.makes
        parts = [values[part.value] if type(part) is _Received else part for part in parts]
        return parts[0] if tree.is_leaf() else pytree.tree_unflatten(parts, tree)
