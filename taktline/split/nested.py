"""Nested values: containers, and objects of users' classes, with tensors in them.

Beside the containers that pytree knows, an object with attributes counts as a container if there is
a tensor in it: a dataclass, a cache of keys and values, a state that blocks hand on.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from taktline import pytree

Part = TypeVar("Part")
Path = tuple[tuple[str, Any], ...]
"""The place of a part: for each container around it, how to get into it, and the key."""

_PLAIN = (bool, int, float, complex, str, bytes, type, FunctionType, BuiltinFunctionType)
_FILLED_BY_UNITS = (defaultdict, deque, OrderedDict)
"""What is made anew in each call, also if it is empty, since a unit may add to it."""
_LEAVES = (*_PLAIN, MethodType, ModuleType, nn.Module, torch.Tensor, torch.Generator)


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


def children_of(value: Any) -> list[tuple[tuple[str, Any], Any]] | None:
    """The parts of a container with their keys; None for a leaf."""
    kind = type(value)
    if isinstance(value, (tuple, list, deque)):
        return [(("item", at), part) for at, part in enumerate(value)]
    if isinstance(value, dict):
        return [(("item", key), part) for key, part in value.items()]
    if kind is slice:
        names = ("start", "stop", "step")
        return [(("attribute", name), getattr(value, name)) for name in names]
    if isinstance(value, (Object, Node)) or value is None or isinstance(value, _LEAVES):
        return None
    if is_object(value):
        return [(("attribute", name), part) for name, part in vars(value).items()]
    return None


def is_object(value: Any) -> bool:
    """Whether a value is an object of Python code with attributes."""
    if value is None or isinstance(value, (*_LEAVES, dict, list, tuple)):
        return False
    return hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in (
        "torch", "builtins", "functools", "enum",
    )  # fmt: skip


def walk(value: Any, path: Path = (), around: tuple[int, ...] = ()) -> Iterator[tuple[Path, Any]]:
    """All leaves of a nested value with their paths."""
    children = None if id(value) in around else children_of(value)
    if children is None:
        yield path, value
        return
    inside = (*around, id(value))
    for key, part in children:
        yield from walk(part, (*path, key), inside)


def tensors_with_paths(value: Any) -> list[tuple[Path, torch.Tensor]]:
    """The tensors in a nested value with their paths."""
    return [(path, leaf) for path, leaf in walk(value) if isinstance(leaf, torch.Tensor)]


def at_path(value: Any, path: Path) -> Any:
    """The part of a nested value at a path."""
    for how, key in path:
        value = value[key] if how == "item" else getattr(value, key)
    return value


def objects_in(value: Any, around: tuple[int, ...] = ()) -> Iterator[tuple[Any, dict[str, Any]]]:
    """All objects in a nested value, with their attributes."""
    if id(value) in around:
        return
    if is_object(value):
        yield value, dict(vars(value))
    for _, part in children_of(value) or ():
        yield from objects_in(part, (*around, id(value)))


def mapped(value: Any, change: Callable[[torch.Tensor], Any], opened: Container[int] = ()) -> Any:
    """A copy of a nested value with tensors replaced, or the value itself if there are none.

    Objects become :class:`Object`, and containers of pytree :class:`Node`, if they have tensors, or
    if their ids are ``opened``.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    children = children_of(value)
    if children is None:
        return value
    kind = type(value)
    if kind is dict:
        return {key: mapped(part, change, opened) for key, part in value.items()}
    if kind is list:
        return [mapped(part, change, opened) for part in value]
    if kind is tuple:
        return tuple([mapped(part, change, opened) for part in value])
    if kind is slice:
        return slice(*[mapped(part, change, opened) for _, part in children])
    is_filled = id(value) in opened or bool(tensors_with_paths(value))
    if kind in _FILLED_BY_UNITS or (
        is_filled and (kind in pytree.SUPPORTED_NODES or isinstance(value, tuple))
    ):
        parts, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
        if not spec.is_leaf():
            return Node(spec, [mapped(part, change, opened) for part in parts])
    if not is_filled:
        return value
    if isinstance(value, (dict, list)) and not hasattr(value, "__dict__"):
        made = copy.copy(value)
        for (_, key), part in children:
            made[key] = mapped(part, change, opened)
        return made
    if isinstance(value, (dict, list)):
        raise TypeError(
            f"{kind.__name__} is a container of its own kind with tensors in it; register it with "
            "torch.utils._pytree.register_pytree_node"
        )
    return Object(kind, {key: mapped(part, change, opened) for (_, key), part in children})


def parts_in(template: Any, kind: type[Part]) -> list[Part]:
    """The parts of some kind in a nested value that :func:`mapped` has returned."""
    found: list[Part] = []
    waiting = [template]
    while waiting:
        part = waiting.pop()
        if type(part) is kind:
            found.append(part)
        elif isinstance(part, Object):
            waiting += part.attributes.values()
        elif isinstance(part, Node):
            waiting += reversed(part.parts)
        elif isinstance(part, dict):
            waiting += reversed(part.values())
        elif isinstance(part, (tuple, list)):
            waiting += reversed(part)
        elif isinstance(part, slice):
            waiting += (part.step, part.stop, part.start)
    return found
