"""Finds out whether a method of a class or an object was replaced."""

from __future__ import annotations

from abc import ABCMeta
from inspect import isfunction
from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["Watched", "is_replaced", "remember"]

_METHODS: dict[type, dict[str, Any]] = {}
"""The methods of each class as they were defined."""
_known: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
"""Whether a class has others, until one of them changes."""


class Watched(ABCMeta):
    """A class of which it is noticed that somebody changes it."""

    def __setattr__(cls, name: str, value: Any) -> None:
        _known.clear()
        super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        _known.clear()
        super().__delattr__(name)


def remember(*classes: type) -> None:
    """Note the methods of classes whose instances can run on Taktline's own stages."""
    for cls in classes:
        names = (name for name in dir(cls) if not name.startswith("__"))
        found = ((name, getattr(cls, name)) for name in names)
        _METHODS[cls] = {name: value for name, value in found if isfunction(value)}


def is_replaced(value: object) -> bool:
    """Whether an object's methods are others than those that its class had when it was defined."""
    cls = type(value)
    if cls not in _known:
        base = next((base for base in cls.__mro__ if base in _METHODS), None)
        _known[cls] = base is None or any(
            getattr(cls, name, None) is not method for name, method in _METHODS[base].items()
        )
    if _known[cls]:
        return True
    base = next(base for base in cls.__mro__ if base in _METHODS)
    return not _METHODS[base].keys().isdisjoint(vars(value))
