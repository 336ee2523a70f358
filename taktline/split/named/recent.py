"""What was learned lately."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

__all__ = ["Recent"]

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
