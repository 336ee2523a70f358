"""Calls that look alike: how to know them again, and what was learned of them lately."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from taktline import pytree
from taktline.split.named.mutable import is_constant
from taktline.split.named.placeholder import Absent, Placeholder

__all__ = ["Recent", "autocast_of", "look"]

Value = TypeVar("Value")

_ROOM = 64
"""More than the lengths that a step, or a program with buckets of lengths, comes back to."""


class Recent(dict[Hashable, Value]):
    """The values that were asked for last; those of longest ago are forgotten.

    >>> squares = Recent()
    >>> [squares.find(number, lambda: number * number) for number in range(100)][-1]
    9801
    >>> len(squares), next(iter(squares))
    (64, 36)
    """

    def find(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key; it is made if it is not known."""
        value = self.pop(key, None)
        if value is None:
            value = make()
        self.keep(key, value)
        return value

    def keep(self, key: Hashable, value: Value) -> None:
        """Put a value last, so that the first one is always the longest unused."""
        self[key] = value
        if len(self) > _ROOM:
            del self[next(iter(self))]


def look(value: Any) -> Any:
    """What a forward can see of an argument without its data, to be compared.

    Without pytree where possible: this runs for every submodule before a stage, each time.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind, *[look(part) for part in value])
    if kind is dict:
        return (kind, *[(key, look(part)) for key, part in value.items()])
    if kind is Absent:
        return value
    if isinstance(value, torch.Tensor):
        plain = value.meta if isinstance(value, Placeholder) else value  # which answers faster
        return (plain.shape, plain.stride(), plain.dtype)
    if is_constant(value):
        return (kind, value)
    leaves, spec = pytree.tree_flatten(value)
    return type(value) if spec.is_leaf() else (spec, *map(look, leaves))


def autocast_of(device: torch.device) -> torch.dtype | None:
    """The type that autocast has for results on a device."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
