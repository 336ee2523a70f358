"""Values that a forward may change in place, such as a list in an attribute of the model."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from taktline import pytree

__all__ = ["cloned", "copies", "is_constant", "is_mutable", "look_at", "put_back", "saved"]

_CONTAINERS = (list, dict, set, deque)
_NOT_OBJECTS = (
    *(type, FunctionType, BuiltinFunctionType, MethodType, ModuleType),
    *(nn.Module, torch.Tensor),
)
_LIBRARIES = ("torch", "transformers", "builtins", "functools")
"""Objects of these do not count what a forward does."""


def is_constant(leaf: object) -> bool:
    """Whether a value is all that there is to know of it."""
    return leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device))


def is_mutable(value: object) -> bool:
    """Whether a value is a container, or an object of a user's class."""
    return isinstance(value, _CONTAINERS) or _is_object(value)


def _is_object(value: object) -> bool:
    if is_constant(value) or isinstance(value, (*_NOT_OBJECTS, *_CONTAINERS, tuple)):
        return False
    return hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in _LIBRARIES


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """What a mutable value, or a tuple, consists of, by place or name."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, set):
        return [(part, part) for part in value]
    if isinstance(value, (list, deque, tuple)):
        return list(enumerate(value))
    return list(vars(value).items()) if _is_object(value) else []


def _tensor_look(tensor: torch.Tensor) -> Any:
    version = 0 if tensor.is_inference() else tensor._version
    return (type(tensor), tuple(tensor.shape), tensor.dtype, id(tensor), version)


def look_at(
    value: Any,
    of_tensor: Callable[[torch.Tensor], Any] = _tensor_look,
    memo: frozenset[int] = frozenset(),
) -> Any:
    """What a value is like, to be compared; tensors by what they are and how often they changed."""
    if is_constant(value):
        return (type(value), value)
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if id(value) in memo or not (is_mutable(value) or isinstance(value, tuple)):
        return id(value)
    inside = memo | {id(value)}
    parts = ((_key(key), look_at(part, of_tensor, inside)) for key, part in _parts(value))
    return (type(value), *parts)


def _key(key: Any) -> Any:
    return key if is_constant(key) else id(key)


def saved(value: Any, memo: frozenset[int] = frozenset()) -> Any:
    """What :func:`put_back` needs to make a mutable value what it is now."""
    if id(value) in memo or not is_mutable(value):
        return value
    inside = memo | {id(value)}
    return _Saved(value, [(key, saved(part, inside)) for key, part in _parts(value)])


class _Saved:
    """A mutable value, and what it consisted of."""

    def __init__(self, value: Any, parts: list[tuple[Any, Any]]) -> None:
        self.value = value
        self.parts = parts


def put_back(kept: Any) -> Any:
    """A value as it was when it was saved: the same object, with the same in it."""
    if not isinstance(kept, _Saved):
        return kept
    parts = [(key, put_back(part)) for key, part in kept.parts]
    _fill(kept.value, parts)
    return kept.value


def cloned(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A mutable value of its own, with the same tensors and constants in it."""
    memo = {} if memo is None else memo
    if not is_mutable(value):
        return value
    if id(value) not in memo:
        memo[id(value)] = made = copy.copy(value)
        _fill(made, [(key, cloned(part, memo)) for key, part in _parts(value)])
    return memo[id(value)]


def _fill(value: Any, parts: list[tuple[Any, Any]]) -> None:
    """Let a mutable value consist of parts."""
    if isinstance(value, list):
        value[:] = [part for _, part in parts]
        return
    table = value if isinstance(value, _CONTAINERS) else vars(value)
    table.clear()
    if isinstance(table, dict):
        table.update(parts)
    elif isinstance(table, set):
        table.update(part for _, part in parts)
    else:
        table.extend(part for _, part in parts)


def copies(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """A tree with copies of what autograd keeps from being changed in place; and these.

    It refuses to change what a backward ends with; versions of copies show whether a stage does.
    """
    made: list[torch.Tensor] = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        made.append(tensor.clone())
        return made[-1]

    return pytree.tree_map_only(torch.Tensor, copied, tree), made
