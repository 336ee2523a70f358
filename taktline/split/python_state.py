"""What a unit sees besides its arguments: its attributes, and numbers and texts in what it shares.

A forward may speak to its submodules through a config, a dict, a class or a global variable. No
stage would hear of it, so what has changed there between submodules is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache, partial
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
_Views = Mapping[Any, tuple[str, Callable[[], Mapping[Any, Any]]]]
"""Where values are, each with what to call it and how to look at it."""


class PythonState:
    """What units see besides their arguments, during one forward."""

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        of_kind = cache(lambda kind: dict(islice(_used_by(kind), _MOST)))
        self._seen_by = dict[str, _Views]()
        for name, unit in units.items():
            parts = {id(part): (path, part) for path, part in unit.named_modules()}
            own = {("own", key): (path, partial(_own, p)) for key, (path, p) in parts.items()}
            values = [each for _, part in parts.values() for each in vars(part).items()]
            shared = ((k, v) for k, v in values if k not in OWN_OF_MODULES and id(v) not in parts)
            seen = self._seen_by[name] = own | dict(islice(_inside(shared), _MOST))
            for kind in {kind for _, part in parts.values() for kind in type(part).__mro__}:
                seen |= of_kind(kind)
        every = {where: view for seen in self._seen_by.values() for where, view in seen.items()}
        self._expected = self._now = _read(every)
        """As all was, but for what units themselves have changed; and before the last unit."""

    def changed_for(self, unit: str) -> str:
        """What the forward has changed that a unit sees, before it runs; or nothing."""
        seen = self._seen_by[unit]
        self._now = _read(seen)
        for (where, key), value in self._now.items():
            if self._expected.get((where, key), self) != value:
                return joined(seen[where][0], str(key))
        return ""

    def note(self, unit: str) -> None:
        """Note what a unit has changed, after it has run."""
        after = _read(self._seen_by[unit])
        self._expected |= {k: v for k, v in after.items() if self._now.get(k, self) != v}


def _read(views: _Views) -> dict[tuple[Any, Any], Any]:
    found = dict[tuple[Any, Any], Any]()
    for where, (_, look) in views.items():
        for key, value in look().items():
            value = value.get(None) if isinstance(value, ContextVar) else value
            if isinstance(value, _PLAIN) and value == value:  # not NaN
                found[where, key] = value
    return found


def _own(part: nn.Module) -> dict[str, Any]:
    """The attributes, parameters and buffers of a module, to compare them."""
    every = {**vars(part), **part._parameters, **part._buffers}
    return {key: v if isinstance(v, _PLAIN) else _identity(v) for key, v in every.items()}


def _identity(value: Any) -> str:
    return f"{id(value)} {isinstance(value, torch.Tensor) and value.requires_grad}"


def _used_by(kind: type) -> Iterator[Any]:
    """Views of a class, and of the global variables that its functions use."""
    if kind.__module__.split(".")[0] in ("torch", "builtins"):
        return
    functions = [each for each in vars(kind).values() if isinstance(each, FunctionType)]
    tables = {n: f.__globals__ for f in functions for n in f.__code__.co_names}

    def variables() -> dict[str, Any]:
        return {name: table[name] for name, table in tables.items() if name in table}

    yield kind, (kind.__name__, partial(vars, kind))
    yield (kind, "variables"), ("", variables)
    yield from _inside(variables().items())


def _inside(items: Iterable[tuple[str, Any]], depth: int = _DEPTH) -> Iterator[Any]:
    """Views of containers and objects, and of what is in them."""
    for name, value in items:
        look = partial(_parts_of, value)
        is_container = isinstance(value, (dict, list, tuple, deque, nn.Module)) or is_object(value)
        if is_container and depth and len(parts := look()) <= _MOST:
            yield id(value), (name, look)
            inside = ((joined(name, str(key)), part) for key, part in parts.items())
            yield from _inside(inside, depth - 1)


def _parts_of(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    return getattr(value, "__dict__", {})
