"""Finds out whether a method of a class or an object was overridden."""

from __future__ import annotations

from collections.abc import Callable, Set
from inspect import isfunction
from operator import attrgetter
from typing import Any, NamedTuple


class _Methods(NamedTuple):
    """The methods of a class as they were defined."""

    names: Set[str]
    read: Callable[[type], tuple[Any, ...]]
    """Reads all of them from a class."""
    defined: tuple[Any, ...]


_METHODS: dict[type, _Methods] = {}


def remember(*classes: type) -> None:
    """Remember the methods of classes whose instances can run on Taktline's own stages."""
    for cls in classes:
        names = [name for name in dir(cls) if not name.startswith("__")]
        methods = {name: m for name in names if isfunction(m := getattr(cls, name))}
        _METHODS[cls] = _Methods(methods.keys(), attrgetter(*methods), (*methods.values(),))


def is_overridden(value: object) -> bool:
    """Whether an object overrides a method that its class was defined with."""
    cls = type(value)
    base = next((base for base in cls.__mro__ if base in _METHODS), None)
    if base is None:
        return True
    names, read, defined = _METHODS[base]
    return read(cls) != defined or not names.isdisjoint(vars(value))
