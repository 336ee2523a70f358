"""Nested values: containers, and objects of users' classes, with tensors in them.

Beside the containers that pytree knows, an object with attributes counts as a container if there is
a tensor in it: a dataclass, a cache of keys and values, a state that blocks hand on.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.user_code import line_of_user

Part = TypeVar("Part")
Path = tuple[tuple[str, Any], ...]
"""The place of a part: for each container around it, how to get into it, and the key."""

_FILLED_BY_UNITS = (defaultdict, deque, OrderedDict)
"""What is made anew in each call, also if it is empty, since a unit may add to it."""
_NO_OBJECTS = (
    *(type(None), bool, int, float, complex, str, bytes, type, dict, list, tuple, deque),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
    *(nn.Module, torch.Tensor, torch.Generator),
)


class Object(NamedTuple):
    """An object of a user's class, as its attributes."""

    kind: type
    attributes: dict[str, Any]

    def build(self) -> Any:
        """A new object with these attributes."""
        new: Any = self.kind.__new__
        made = new(self.kind)
        vars(made).update(self.attributes)
        return made


class Node(NamedTuple):
    """A container that pytree knows, as its parts."""

    spec: Any
    parts: list[Any]

    def build(self) -> Any:
        """A new container with these parts."""
        return pytree.tree_unflatten(self.parts, self.spec)


def is_object(value: Any) -> bool:
    """Whether a value is an object of Python code with attributes."""
    if isinstance(value, _NO_OBJECTS) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.split(".")[0] not in ("torch", "builtins", "functools", "enum")


def children_of(value: Any) -> list[tuple[tuple[str, Any], Any]] | None:
    """The parts of a container with their keys; None for a leaf."""
    if isinstance(value, (tuple, list, deque)):
        return [(("item", at), part) for at, part in enumerate(value)]
    if isinstance(value, dict):
        return [(("item", key), part) for key, part in value.items()]
    if type(value) is slice:
        return [(("attribute", name), getattr(value, name)) for name in ("start", "stop", "step")]
    if is_object(value):
        return [(("attribute", name), part) for name, part in vars(value).items()]
    return None


def walk(value: Any, path: Path = (), seen: set[int] | None = None) -> Iterator[tuple[Path, Any]]:
    """A nested value and all its parts with their paths; into each container once."""
    seen = set() if seen is None else seen
    yield path, value
    children = children_of(value)
    if children and id(value) not in seen:
        seen.add(id(value))
        for key, part in children:
            yield from walk(part, (*path, key), seen)


def all_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested value, also in objects."""
    return [part for _, part in walk(value) if isinstance(part, torch.Tensor)]


def at_path(value: Any, path: Path) -> Any:
    """The part of a nested value at a path."""
    for how, key in path:
        value = value[key] if how == "item" else getattr(value, key)
    return value


def mapped(
    value: Any, change: Callable[[torch.Tensor], Any], opened: dict[int, Any] | None = None
) -> Any:
    """A copy of a nested value with tensors replaced, or the value itself if there are none.

    Objects become :class:`Object`, and containers of pytree :class:`Node`, if they have tensors, or
    if their ids are ``opened``, which notes what they became.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    kind, children, opened = type(value), children_of(value), opened or {}
    if opened.get(id(value)) is not None:
        return opened[id(value)]
    is_plain, is_opened = kind in (dict, list, tuple, slice), id(value) in opened
    is_filled = is_plain or is_opened or kind in _FILLED_BY_UNITS
    if children is None or not (is_filled or all_tensors(value)):
        return value
    if not is_plain and (kind in pytree.SUPPORTED_NODES or isinstance(value, tuple)):
        parts, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
        if not spec.is_leaf():
            return Node(spec, [mapped(part, change, opened) for part in parts])
    if not is_plain and not is_object(value):
        raise PartitionError(
            f"{line_of_user()}: {kind.__name__} is a container of its own kind with tensors in it; "
            "register it with torch.utils._pytree.register_pytree_node"
        )
    if is_opened:
        opened[id(value)] = value  # in itself
    parts = [mapped(part, change, opened) for _, part in children]
    if kind is slice:
        return slice(*parts)
    if kind is list or kind is tuple:
        return kind(parts)
    named = {key: part for ((_, key), _), part in zip(children, parts, strict=True)}
    if is_opened:
        opened[id(value)] = Object(kind, named)
    return named if kind is dict else Object(kind, named)


def swapped(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], seen: set[int] | None = None
) -> Any:
    """A nested value with other tensors: in the same lists, dicts and objects, but new tuples."""
    if isinstance(value, torch.Tensor):
        return change(value)
    seen, children = set() if seen is None else seen, children_of(value)
    if not children or id(value) in seen:
        return value
    if isinstance(value, (tuple, slice)):
        parts = [swapped(part, change, seen) for _, part in children]
        if all(new is old for new, (_, old) in zip(parts, children, strict=True)):
            return value
        if isinstance(value, slice):
            return slice(*parts)
        spec = pytree.tree_structure(value, is_leaf=lambda part: part is not value)
        return pytree.tree_unflatten(parts, spec)
    seen.add(id(value))
    for (how, key), old in children:
        new = swapped(old, change, seen)
        if new is not old:
            (value if how == "item" else vars(value))[key] = new
    return value


def parts_in(template: Any, kind: type[Part]) -> list[Part]:
    """The parts of some kind in a nested value that :func:`mapped` has returned."""
    if type(template) is kind:
        return [template]
    if isinstance(template, slice):
        template = (template.start, template.stop, template.step)
    if isinstance(template, dict):
        template = tuple(template.values())
    if isinstance(template, (tuple, list)):
        return [found for part in template for found in parts_in(part, kind)]
    return []
