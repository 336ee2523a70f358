"""The way to where a stage begins, as one call has gone it, so that others like it go it quickly.

::

    forward of the model:   embed   + position   layer 0   layer 1   layer 2   layer 3
    stage 1 of 3, first:    (…)     (…)          (…)       ▶ real    real      ▶ leave
    script:                 (…)     (…)          value     ▶ bare    bare      ▶ leave

(…) are placeholders. The forward runs each time, so whatever it decides it decides anew. But what
submodules of other stages and operations on placeholders return is known, and what comes from the
stage before is put where its placeholder was made: from there on, the forward sees nothing but
tensors with data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from taktline import pytree
from taktline.split.example import Args, Kwargs
from taktline.split.named.mutable import is_constant
from taktline.split.named.placeholder import Placeholder
from taktline.split.named.recorded import Recorded

__all__ = ["Coming", "Script", "Step", "is_like", "written"]


_NOTHING = object()


class Step(NamedTuple):
    """A call of a submodule of another stage, or of a function of torch with placeholders."""

    who: Any
    training: bool | None
    """Of a submodule."""
    args: Args
    """In a script: placeholders are these very ones, a tensor with data is a :class:`_Look`."""
    kwargs: Kwargs
    output: Any
    makes: tuple[tuple[Any, ...], pytree.TreeSpec] | None = None
    """The parts of the output, if it must be put together anew."""
    runs: bool = False
    """Whether the output has data, so that the function must run."""
    only: object = _NOTHING
    """The one argument, if it is a placeholder and no more need be looked at."""


_Tensor: Any = torch.Tensor
_OF_GRADIENTS = (
    _Tensor.requires_grad.__get__,
    _Tensor.grad_fn.__get__,
    _Tensor.is_leaf.__get__,
    _Tensor.retains_grad.__get__,
)
"""What a placeholder answers otherwise than the value that comes in its place."""


class Script(NamedTuple):
    """All steps up to where a stage begins."""

    steps: tuple[Step, ...]
    places: tuple[tuple[tuple[Any, ...], int], ...]
    """Where, among the arguments with which the stage begins, which value is."""


class Coming(NamedTuple):
    """In the place of a placeholder: a value that comes from the stage before."""

    value: int


class _Look(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Object(NamedTuple):
    kind: type


class _Unknown(Exception):
    """Something that cannot be known again."""


def written(
    seen: Iterable[Step],
    coming: Mapping[int, int],
    places: Sequence[tuple[tuple[Any, ...], int]],
) -> Script | None:
    """The script of what was seen, after which a stage begins with values in these places.

    ``coming`` are the values that come, by the ids of their placeholders, or of themselves. None if
    there can be no script: values that come must be what a step returns, and placeholders of them
    not go into operations before the stage begins, which would be done with their data.
    """
    made: set[int] = set()
    steps: list[Step] = []
    for step in seen:
        try:
            known = _known_again(step, coming)
        except _Unknown:
            return None
        if known is not None:
            steps.append(known)
            made.update(id(part) for part in pytree.tree_leaves(step.output))
    if not coming.keys() <= made:
        return None
    return Script(tuple(steps), tuple(places))


def _known_again(step: Step, coming: Mapping[int, int]) -> Step | None:
    """A step as it is to be known; None if it will go unnoticed, as it has no placeholders then."""
    parts, tree = pytree.tree_flatten(step.output)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    runs = any(not isinstance(part, Placeholder) and id(part) not in coming for part in tensors)
    if step.training is None:
        leaves = pytree.tree_leaves((step.args, step.kwargs))
        given = [id(part) in coming for part in leaves if isinstance(part, Placeholder)]
        if any(given):
            if step.who in _OF_GRADIENTS or tensors or not all(given):
                raise _Unknown
            return None
    elif runs or not all(isinstance(part, torch.Tensor) or is_constant(part) for part in parts):
        raise _Unknown
    made = tuple(Coming(coming[id(part)]) if id(part) in coming else part for part in parts)
    is_recorded = type(step.output) is Recorded
    whole = step.output.output if is_recorded else step.output
    is_shared = isinstance(whole, torch.Tensor) or type(whole) is tuple
    remade = (
        not is_shared
        or (is_recorded and step.output.arguments)
        or any(type(part) is Coming for part in made)
    )
    args, kwargs = _known(step.args, coming), _known(step.kwargs, coming)
    is_simple = len(args) == 1 and isinstance(args[0], Placeholder)
    return step._replace(
        args=args,
        kwargs=kwargs,
        output=None if runs or remade else step.output,
        makes=(made, tree) if remade else None,
        runs=runs,
        only=args[0] if is_simple and not (kwargs or remade or runs) else _NOTHING,
    )


def _known(value: Any, coming: Mapping[int, int]) -> Any:
    """What an argument must be like."""
    if isinstance(value, Placeholder):
        return Coming(coming[id(value)]) if id(value) in coming else value
    if isinstance(value, torch.Tensor):
        return _Look(value.shape, value.stride(), value.dtype)
    if type(value) in (tuple, list):
        return type(value)(_known(part, coming) for part in value)
    if type(value) is dict:
        return {key: _known(part, coming) for key, part in value.items()}
    if is_constant(value) or isinstance(value, (torch.Size, slice, type(...))):
        return value
    if not pytree.tree_structure(value).is_leaf():
        raise _Unknown
    return _Object(type(value))


def is_like(known: Any, found: Any, values: Sequence[Any]) -> bool:
    """Whether an argument is like that of a step; ``values`` come from the stage before."""
    if found is known:
        return True
    kind = type(known)
    if kind is Placeholder:
        return False
    if kind is Coming:
        return found is values[known.value]
    if kind is _Look:
        return (
            isinstance(found, torch.Tensor)
            and type(found) is not Placeholder
            and found.shape == known.shape
            and found.dtype is known.dtype
            and found.stride() == known.stride
        )
    if kind is _Object:
        return type(found) is known.kind
    if type(found) is not kind:
        return False
    if kind is dict:
        return known.keys() == found.keys() and _all_like(
            known.values(), map(found.__getitem__, known), values
        )
    if kind is tuple or kind is list:
        return len(known) == len(found) and _all_like(known, found, values)
    return known == found


def _all_like(known: Iterable[Any], found: Iterable[Any], values: Sequence[Any]) -> bool:
    """The same of as many arguments."""
    for one, other in zip(known, found, strict=True):
        if one is not other and not is_like(one, other, values):
            return False
    return True
