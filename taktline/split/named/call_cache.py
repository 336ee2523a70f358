"""A cache of what was learned from calls, by the shapes and types of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from taktline import pytree
from taktline.split.named.mutable import is_constant
from taktline.split.named.placeholder import Absent, Placeholder

__all__ = ["CallCache", "autocast_dtype", "cache_key"]

Value = TypeVar("Value")

_SIZE = 64
"""More entries than a program has buckets of sequence lengths."""


class CallCache(dict[Hashable, Value]):
    """A dict that drops the entries which were not used for longest.

    >>> squares = CallCache()
    >>> [squares.find(number, lambda: number * number) for number in range(100)][-1]
    9801
    >>> len(squares), next(iter(squares))
    (64, 36)
    """

    def find(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key; ``make`` makes it if it is missing."""
        value = self.pop(key, None)
        if value is None:
            value = make()
        self.keep(key, value)
        return value

    def keep(self, key: Hashable, value: Value) -> None:
        """Put a value last."""
        self[key] = value
        if len(self) > _SIZE:
            del self[next(iter(self))]


def cache_key(value: Any) -> Any:
    """All that a forward can see of an argument without its data.

    Without pytree where possible: this runs in each call, for every unit before a stage.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind, *[cache_key(part) for part in value])
    if kind is dict:
        return (kind, *[(key, cache_key(part)) for key, part in value.items()])
    if kind is Absent:
        return value
    if isinstance(value, torch.Tensor):
        plain = value.meta if isinstance(value, Placeholder) else value  # which answers faster
        return (plain.shape, plain.stride(), plain.dtype)
    if is_constant(value):
        return (kind, value)
    leaves, spec = pytree.tree_flatten(value)
    return kind if spec.is_leaf() else (spec, *map(cache_key, leaves))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type in which autocast computes on a device; None if autocast is off."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
