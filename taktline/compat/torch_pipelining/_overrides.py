"""Finds out whether a method of a class or an object was overridden."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Set
from inspect import isfunction
from typing import Any
from weakref import WeakKeyDictionary

_METHODS: dict[type, dict[str, Any]] = {}
"""The methods of each class as they were defined."""
_known: WeakKeyDictionary[type, Set[str] | None] = WeakKeyDictionary()
"""The names of a class's methods, None if one is overridden; cleared when a class changes."""


class Watched(ABCMeta):
    """A metaclass that notices changes to its classes."""

    def __setattr__(cls, name: str, value: Any) -> None:
        _known.clear()
        super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        _known.clear()
        super().__delattr__(name)


def remember(*classes: type) -> None:
    """Remember the methods of classes whose instances can run on Taktline's own stages."""
    for cls in classes:
        names = (name for name in dir(cls) if not name.startswith("__"))
        found = ((name, getattr(cls, name)) for name in names)
        _METHODS[cls] = {name: value for name, value in found if isfunction(value)}


def is_overridden(value: object) -> bool:
    """Whether an object overrides a method that its class was defined with."""
    cls = type(value)
    if cls not in _known:
        base = next((base for base in cls.__mro__ if base in _METHODS), None)
        methods = {} if base is None else _METHODS[base]
        same = methods and all(getattr(cls, name, None) is m for name, m in methods.items())
        _known[cls] = methods.keys() if same else None
    names = _known[cls]
    return names is None or not names.isdisjoint(vars(value))
