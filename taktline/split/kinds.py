"""Kinds of calls: all that a forward can see of its arguments without their data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from taktline import pytree
from taktline.split.nested import is_object

_CONSTANTS = (bool, int, float, str, Enum, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Absent:
    """Sent instead of an argument of the model whose data no later stage needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype


pytree.register_own(
    Absent,
    lambda absent: ([], [absent.dtype, *absent.shape]),
    lambda _, context: Absent(tuple(context[1:]), context[0]),
)


def key_of(value: Any, tensors: list[Any]) -> Any:
    """All that a forward can see of an argument without its data; adds the tensors in it to a list.

    Without pytree where possible: this runs in each call.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind, *[key_of(part, tensors) for part in value])
    if kind is dict:
        return (kind, *[(key, key_of(part, tensors)) for key, part in value.items()])
    if kind is Absent or isinstance(value, torch.Tensor):
        tensors.append(value)
        return (value.shape, value.dtype)
    if value is None or isinstance(value, _CONSTANTS):
        return (kind, value)
    if kind is slice:
        return (kind, key_of((value.start, value.stop, value.step), tensors))
    if is_object(value) and kind not in pytree.SUPPORTED_NODES:
        return (kind, *[(key, key_of(part, tensors)) for key, part in vars(value).items()])
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda part: type(part) is Absent)
    if spec.is_leaf():
        return value  # compared by its own equality
    return (spec, *[key_of(leaf, tensors) for leaf in leaves])
