"""Nested values: containers, and objects of users' classes, with tensors in them; and templates.

Beside the containers that pytree knows, an object with attributes counts as a container if there is
a tensor in it: a dataclass, a cache of keys and values, a state that blocks hand on. A template
describes a nested value, with values in the places of its tensors; what is one object in it, or
refers to itself, is so in what is made of it, too.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

import taktline
from taktline import pytree
from taktline.errors import PartitionError

Part = TypeVar("Part")
Path = tuple[tuple[str, Any], ...]
"""The place of a part: for each container around it, how to get into it, and the key."""


class Value(NamedTuple):
    """A tensor of the forward: an argument of the model, or what a step makes."""

    number: int


class State(NamedTuple):
    """A parameter or buffer of the model that the forward itself uses."""

    name: str


@dataclass(frozen=True, slots=True)
class Absent:
    """Sent instead of an argument of the model whose data no later stage needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype


pytree.register_own(
    Absent,
    lambda absent: ([], [absent.dtype, *absent.shape]),
    lambda _, context: Absent(tuple(context[1:]), context[0]),
)


@dataclass(eq=False, slots=True)
class Node:
    """In a template: an object of a user's class, or a container that pytree knows."""

    kind: type
    spec: Any = None
    """Of a container: its structure."""
    parts: Any = None
    """Attributes by their names; of a container, a list."""


_LEAVES = (torch.Tensor, Absent)
_PLAIN = (tuple, list, dict, slice)
_FILLED_BY_UNITS = (defaultdict, deque, OrderedDict)
"""What is made anew in each call, also if it is empty, since a unit may add to it."""
_NO_OBJECTS = (
    *(type(None), bool, int, float, complex, str, bytes, type, dict, list, tuple, deque),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType, Absent, Node),
    *(nn.Module, torch.Tensor, torch.Generator),
)


def is_object(value: Any) -> bool:
    """Whether a value is an object of Python code with attributes."""
    kind = type(value)
    if isinstance(value, _NO_OBJECTS) or kind.__module__.split(".")[0] in _NOT_OF_USERS:
        return False
    if hasattr(value, "__dict__"):
        return True
    # Others compare by what is in them, such as a path.
    return bool(_slots_of(kind)) and (
        is_dataclass(kind) or kind.__hash__ in (object.__hash__, None)
    )


_NOT_OF_USERS = ("torch", "builtins", "functools", "enum")


def _slots_of(kind: type) -> list[str]:
    members = (pair for each in kind.__mro__ if each is not object for pair in vars(each).items())
    found = [name for name, member in members if isinstance(member, MemberDescriptorType)]
    return [name for name in found if name != "__dict__"]


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, also those in slots."""
    slots = {n: getattr(value, n) for n in _slots_of(type(value)) if hasattr(value, n)}
    return {**getattr(value, "__dict__", {}), **slots}


def _set(value: Any, key: str, part: Any) -> None:
    if isinstance(getattr(type(value), key, None), MemberDescriptorType):
        object.__setattr__(value, key, part)  # also of a frozen one
    else:
        vars(value)[key] = part


def children_of(value: Any) -> list[tuple[tuple[str, Any], Any]] | None:
    """The parts of a container with their keys; None for a leaf."""
    if isinstance(value, (tuple, list, deque)):
        return [(("item", at), part) for at, part in enumerate(value)]
    if isinstance(value, dict):
        return [(("item", key), part) for key, part in value.items()]
    if type(value) is slice:
        return [(("attribute", name), getattr(value, name)) for name in ("start", "stop", "step")]
    if is_object(value):
        return [(("attribute", name), part) for name, part in attributes_of(value).items()]
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
    value: Any,
    change: Callable[[Any], Any],
    opened: Collection[int] = (),
    made: dict[int, Any] | None = None,
) -> Any:
    """The template of a nested value, with its tensors replaced.

    Objects and containers of pytree are left as they are if there are no tensors in them, unless
    their ids are ``opened``.
    """
    if isinstance(value, _LEAVES):
        return change(value)
    kind, children = type(value), children_of(value)
    if isinstance(value, Iterator):
        raise _refused(kind, "is used up by a call, and stages make theirs anew; pass a list")
    is_made = kind in _PLAIN or kind in _FILLED_BY_UNITS or id(value) in opened
    if children is None or not (is_made or any(isinstance(p, _LEAVES) for _, p in walk(value))):
        return value
    made = {} if made is None else made
    if id(value) in made:
        if made[id(value)] is None:
            raise _refused(kind, "refers to itself; let a list, dict or object do so")
        return made[id(value)]

    def part_of(part: Any) -> Any:
        return mapped(part, change, opened, made)

    made[id(value)] = None
    if kind is slice or kind is tuple:
        parts = [part_of(part) for _, part in children]
        made[id(value)] = slice(*parts) if kind is slice else tuple(parts)
    elif kind is list:
        made[id(value)] = template = []
        template.extend(part_of(part) for part in value)
    elif kind is dict:
        made[id(value)] = template = {}
        template.update((key, part_of(part)) for key, part in value.items())
    elif kind in pytree.SUPPORTED_NODES or isinstance(value, tuple):
        parts, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
        made[id(value)] = Node(kind, spec, [part_of(part) for part in parts])
    elif is_object(value):
        made[id(value)] = node = Node(kind)
        node.parts = {key: part_of(part) for (_, key), part in children}
    else:
        how = "register it with torch.utils._pytree.register_pytree_node"
        raise _refused(kind, f"is a container of its own kind with tensors in it; {how}")
    return made[id(value)]


def _refused(kind: type, what: str) -> PartitionError:
    return PartitionError(f"{line_of_user()}: {kind.__name__} {what}")


def filled(template: Any, values: Mapping[Any, Any], made: dict[int, Any] | None = None) -> Any:
    """The nested value that a template describes."""
    kind = type(template)
    if kind is Value or kind is State:
        return values[template]
    if kind is not Node and kind not in _PLAIN:
        return template
    made = {} if made is None else made
    if id(template) in made:
        return made[id(template)]
    if kind is list:
        made[id(template)] = result = []
        result.extend([filled(part, values, made) for part in template])
    elif kind is dict:
        made[id(template)] = result = {}
        result.update({key: filled(part, values, made) for key, part in template.items()})
    elif kind is tuple:
        result = tuple([filled(part, values, made) for part in template])
    elif kind is slice:
        parts = (template.start, template.stop, template.step)
        result = slice(*[filled(part, values, made) for part in parts])
    elif template.spec is None:
        new: Any = template.kind.__new__
        made[id(template)] = result = new(template.kind)
        for key, part in template.parts.items():
            _set(result, key, filled(part, values, made))
    else:
        parts = [filled(part, values, made) for part in template.parts]
        result = pytree.tree_unflatten(parts, template.spec)
    made[id(template)] = result
    return result


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
        if new is old:
            continue
        if how == "item":
            value[key] = new
        else:
            _set(value, key, new)
    return value


def parts_in(template: Any, kind: type[Part], around: tuple[int, ...] = ()) -> list[Part]:
    """The parts of some kind in a template; ``around`` are the containers that it is in."""
    if isinstance(template, kind):
        return [template]
    if type(template) not in (*_PLAIN, Node) or id(template) in around:
        return []
    around = (*around, id(template))
    if type(template) is Node:
        template = template.parts
    if type(template) is slice:
        template = (template.start, template.stop, template.step)
    parts = template.values() if isinstance(template, dict) else template
    return [found for part in parts for found in parts_in(part, kind, around)]


_OURS = os.path.dirname(os.path.abspath(taktline.__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_SKIPPED = (_OURS, _TORCH, contextlib.__file__, copy.__file__, "<")


def line_of_user() -> str:
    """The innermost line that is neither of torch nor of this package, as ``file:line``."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_SKIPPED):
            here = os.path.join(os.getcwd(), "")
            return f"{name.removeprefix(here)}:{frame.f_lineno}"
        frame = frame.f_back
    return "the forward"
