"""What a unit sees besides its arguments: its attributes, and numbers and texts in what it shares.

A forward may speak to its submodules through a config, a dict, a class or a global variable. No
stage would hear of it, so what has changed there between submodules is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from itertools import islice
from types import FunctionType
from typing import Any

import torch
from torch import nn

from taktline.split.steps import is_object
from taktline.split.without_data import joined

OWN_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that each module has."""
_PLAIN = (bool, int, float, str)
_DEPTH, _MOST = 3, 300
"""How deep containers are looked into, and how many parts one may have, and a unit containers."""
_ABSENT = object()
_View = Callable[[], Mapping[Any, Any]]


def attributes_in(unit: nn.Module) -> dict[tuple[str, str], Any]:
    """The attributes, parameters and buffers of the modules in a unit, to compare them."""
    return {
        (path, key): value if isinstance(value, _PLAIN) else (id(value), _is_trained(value))
        for path, part in unit.named_modules()
        for key, value in (*vars(part).items(), *part._parameters.items(), *part._buffers.items())
    }


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class SharedState:
    """The numbers and texts that units see in what they share with others, during one forward."""

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self._views: dict[Any, tuple[str, _View]] = {}
        self._seen_by: dict[str, set[Any]] = {}
        of_kinds: dict[type, set[Any]] = {}
        for name, unit in units.items():
            parts = list(unit.modules())
            own = {id(part) for part in parts}
            shared = ((k, v) for part in parts for k, v in vars(part).items() if id(v) not in own)
            seen = self._seen_by[name] = self._found(_of_parts(shared))
            for kind in {kind for part in parts for kind in type(part).__mro__}:
                if kind not in of_kinds:
                    of_kinds[kind] = self._found(_of_kind(kind))
                seen |= of_kinds[kind]
        self._expected = self._read(self._views)
        """As they were, but for what units themselves have changed."""
        self._now = self._expected

    def _found(self, views: Iterable[tuple[Any, tuple[str, _View]]]) -> set[Any]:
        found = dict(islice(views, _MOST))
        self._views |= found
        return set(found)

    def changed_for(self, unit: str) -> str:
        """What the forward has changed that a unit sees, before it runs; or nothing."""
        self._now = self._read(self._seen_by[unit])
        for (where, key), value in self._now.items():
            if self._expected.get((where, key), _ABSENT) != value:
                return joined(self._views[where][0], str(key))
        return ""

    def note(self, unit: str) -> None:
        """Note what a unit has changed, after it has run."""
        after = self._read(self._seen_by[unit])
        self._expected.update(item for item in after.items() if self._now.get(item[0]) != item[1])

    def _read(self, views: Iterable[Any]) -> dict[tuple[Any, Any], Any]:
        return {
            (where, key): value
            for where in views
            for key, value in self._views[where][1]().items()
            if isinstance(value, _PLAIN) and value == value  # not NaN
        }


_Views = Iterator[tuple[Any, tuple[str, _View]]]
"""Where values are, each with what to call it and how to look at it."""


def _of_parts(parts: Iterable[tuple[str, Any]], depth: int = _DEPTH) -> _Views:
    """Those of containers, objects and other modules."""
    for name, value in parts:
        if name in OWN_OF_MODULES:
            continue
        if isinstance(value, ContextVar):
            yield id(value), ("", partial(_value_of, value, name))
        elif isinstance(value, (dict, list, tuple, deque, nn.Module)) or is_object(value):
            inside = _parts_of(value)
            if depth and len(inside) <= _MOST:
                yield id(value), (name, partial(_parts_of, value))
                yield from _of_parts(
                    ((joined(name, str(key)), part) for key, part in inside.items()), depth - 1
                )


def _of_kind(kind: type) -> _Views:
    """Those of a class, and of the global variables that its functions use."""
    if kind.__module__.split(".")[0] in ("torch", "builtins"):
        return
    yield id(kind), (kind.__name__, partial(vars, kind))
    for function in vars(kind).values():
        if not isinstance(function, FunctionType):
            continue
        table = function.__globals__
        used = {name: table[name] for name in function.__code__.co_names if name in table}
        yield from _of_parts(used.items())
        for name in (name for name, value in used.items() if isinstance(value, _PLAIN)):
            yield (id(table), name), ("", partial(_entry_of, table, name))


def _parts_of(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    return getattr(value, "__dict__", {})


def _value_of(variable: ContextVar[Any], name: str) -> Mapping[str, Any]:
    return {name: variable.get(None)}


def _entry_of(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return {name: table.get(name)}
