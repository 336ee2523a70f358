"""Kinds of calls: all that a forward can see of its arguments without their data."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.nested import Absent, attributes_of, is_object

_CONSTANTS = (bool, int, float, str, Enum, torch.dtype, torch.device)
_DEPTH = 100


def key_of(value: Any, tensors: list[Any], depth: int = 0) -> Any:
    """All that a forward can see of an argument without its data; adds the tensors in it to a list.

    Without pytree where possible: this runs in each call.
    """
    kind = type(value)
    if kind is Absent or kind is torch.Tensor:
        tensors.append(value)
        return (value.shape, value.dtype)
    if kind is tuple or kind is list:
        return (kind, *[key_of(part, tensors, depth + 1) for part in value])
    if kind is dict:
        return (kind, *[(key, key_of(part, tensors, depth + 1)) for key, part in value.items()])
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return (value.shape, value.dtype)
    if value is None or isinstance(value, _CONSTANTS):
        return (kind, value)
    if kind is slice:
        return (kind, key_of((value.start, value.stop, value.step), tensors, depth + 1))
    if depth > _DEPTH:
        raise PartitionError(
            f"an argument of the model ({kind.__name__}) refers to itself; pass what it has, and "
            "let the forward make it"
        )
    if is_object(value) and kind not in pytree.SUPPORTED_NODES:
        return (kind, key_of(attributes_of(value), tensors, depth + 1))
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda part: type(part) is Absent)
    if spec.is_leaf():
        try:
            hash(value)
        except TypeError as error:
            raise PartitionError(
                f"an argument of the model cannot be compared with that of other calls ({error}); "
                "pass tensors, numbers and texts, also in lists, dicts and dataclasses"
            ) from None
        return value  # compared by its own equality
    return (spec, *[key_of(leaf, tensors, depth + 1) for leaf in leaves])
