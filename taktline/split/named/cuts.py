"""Where stages begin: with a submodule, or with one of several calls of it."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

__all__ = ["Cut"]


class Cut(NamedTuple):
    """A call of a submodule, with which a stage begins.

    >>> Cut.read("encoder.layer@3", ["encoder.layer"])
    'encoder.layer@3'
    """

    unit: str
    call: int = 0
    """Which call of the submodule, from 0 up."""

    @classmethod
    def read(cls, text: str, names: Container[str]) -> Cut:
        """What a text says; ``names`` are those of submodules, which may have an @ themselves."""
        unit, _, call = text.rpartition("@")
        if text in names or not (unit and call.isdecimal()):
            return cls(text)
        return cls(unit, int(call))

    def __str__(self) -> str:
        return f"{self.unit}@{self.call}" if self.call else self.unit

    def __repr__(self) -> str:
        return repr(str(self))
