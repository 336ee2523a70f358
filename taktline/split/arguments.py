"""The arguments of a call: how users write them, and what becomes of the tensors among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from taktline import pytree
from taktline.errors import PartitionError

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = tuple[Args, Kwargs]

_CHANGE_STATISTICS = (
    torch.ops.aten.batch_norm.default,
    torch.ops.aten.instance_norm.default,
    torch.ops.aten.native_batch_norm.default,
)
"""Operations that write to running statistics, which their schemas do not say."""


def arguments_of(example: Any) -> Call:
    """An example as positional and keyword arguments.

    >>> arguments_of(((1, 2), {"scale": 3})), arguments_of((1, 2)), arguments_of({"scale": 3})
    (((1, 2), {'scale': 3}), ((1, 2), {}), ((), {'scale': 3}))
    """
    match example:
        case (tuple() as args, dict() as kwargs):
            pass
        case tuple():
            args, kwargs = example, {}
        case Mapping():
            args, kwargs = (), dict(example)
        case torch.Tensor():
            args, kwargs = (example,), {}
        case _:
            raise PartitionError(
                "example must be a tuple of arguments, a dict of keyword arguments, or (args, "
                f"kwargs), not {type(example).__name__}"
            )
    if unnamed := [key for key in kwargs if not isinstance(key, str)]:
        raise PartitionError(
            f"example has the keyword {unnamed[0]!r}, which is not a name; pass names of arguments"
        )
    return args, kwargs


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested values."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def device_of(tree: Any) -> torch.device:
    """The device of the first tensor in nested values, or the CPU."""
    tensors = tensors_in(tree)
    return tensors[0].device if tensors else torch.device("cpu")


def written_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operation writes to."""
    schema = getattr(op, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else (value,)
    if op in _CHANGE_STATISTICS:
        mean, var, is_training = args[3:6]
        yield from (mean, var) if is_training else ()
