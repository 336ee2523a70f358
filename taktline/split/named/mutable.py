"""Values that a forward may change in place, such as a list in an attribute of the model."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Container, Iterable
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from taktline import pytree
from taktline.split.named.placeholder import Placeholder

_CONSTANTS = (bool, int, float, str, Enum, torch.dtype, torch.device)
_CONTAINERS = (list, dict, set, deque)
_NOT_OBJECTS = (
    *(type, FunctionType, BuiltinFunctionType, MethodType, ModuleType),
    *(nn.Module, torch.Tensor),
)
_LIBRARIES = ("torch", "transformers", "builtins", "functools")
"""A forward does not keep its state in objects of these libraries."""


def is_constant(leaf: object) -> bool:
    """Whether a value cannot change and compares by value."""
    return leaf is None or isinstance(leaf, _CONSTANTS)


def is_mutable(value: object) -> bool:
    """Whether a value is a container, also a tuple, or an object of a user's class."""
    if isinstance(value, (*_CONTAINERS, tuple)):
        return True
    if is_constant(value) or isinstance(value, _NOT_OBJECTS) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.split(".")[0] not in _LIBRARIES


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """The parts of a mutable value, by place or name."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, set):
        return [(part, part) for part in value]
    if isinstance(value, (list, deque, tuple)):
        return list(enumerate(value))
    return list(vars(value).items())


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def _tensor_fingerprint(tensor: torch.Tensor) -> Any:
    return (type(tensor), tuple(tensor.shape), tensor.dtype, id(tensor), version_of(tensor))


def fingerprint(
    value: Any,
    of_tensor: Callable[[torch.Tensor], Any] = _tensor_fingerprint,
    memo: frozenset[int] = frozenset(),
) -> Any:
    """A summary of a value that differs once the value has changed.

    By default tensors are compared by identity and version.
    """
    if is_constant(value):
        return (type(value), value)
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if id(value) in memo or not is_mutable(value):
        return id(value)
    inside = memo | {id(value)}
    return (
        type(value),
        *(
            (key if is_constant(key) else id(key), fingerprint(part, of_tensor, inside))
            for key, part in _parts(value)
        ),
    )


def save(values: Iterable[Any]) -> list[tuple[Any, list[tuple[Any, Any]]]]:
    """All mutable values in some values, and the parts of each, to undo later changes."""
    found: dict[int, tuple[Any, list[tuple[Any, Any]]]] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if is_mutable(value) and id(value) not in found:
            found[id(value)] = (value, _parts(value))
            waiting += [part for _, part in found[id(value)][1]]
    return list(found.values())


def restore(saved: Iterable[tuple[Any, list[tuple[Any, Any]]]]) -> None:
    """Give all values the parts that they had when they were saved."""
    for value, parts in saved:
        if not isinstance(value, tuple):
            _fill(value, parts)


def clone(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy of a mutable value and of the mutable values in it, with the same tensors."""
    memo = {} if memo is None else memo
    if not is_mutable(value):
        return value
    if isinstance(value, tuple):
        parts, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
        if spec.is_leaf() or not any(map(is_mutable, parts)):
            return value
        return pytree.tree_unflatten([clone(part, memo) for part in parts], spec)
    if id(value) not in memo:
        memo[id(value)] = made = copy.copy(value)
        _fill(made, [(key, clone(part, memo)) for key, part in _parts(value)])
    return memo[id(value)]


def _fill(value: Any, parts: list[tuple[Any, Any]]) -> None:
    """Replace all parts of a mutable value."""
    table = value if isinstance(value, _CONTAINERS) else vars(value)
    table.clear()
    if isinstance(table, dict):
        table.update(parts)
    elif isinstance(table, set):
        table.update(part for _, part in parts)
    else:
        table.extend(part for _, part in parts)


def with_copies(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """A tree with copies of the tensors that require gradients; and these copies.

    Autograd refuses to change a leaf in place. The version of a copy shows whether a stage does.
    """
    made: list[torch.Tensor] = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        made.append(tensor.clone())
        return made[-1]

    return pytree.tree_map_only(torch.Tensor, copied, tree), made


def copied(tree: Any, places: Container[int] | None = None) -> Any:
    """A tree with copies of its tensors, by default of all; ``places`` are those of leaves.

    Copies have the same strides. A forward cannot change a tensor whose elements overlap.
    """
    leaves, spec = pytree.tree_flatten(tree)
    made: dict[int, Any] = {}
    for place, leaf in enumerate(leaves):
        if (places is None or place in places) and is_writable(leaf) and id(leaf) not in made:
            new = leaf.new_empty_strided(leaf.shape, leaf.stride()).copy_(leaf)
            made[id(leaf)] = new.requires_grad_(leaf.requires_grad)
    return pytree.tree_unflatten([made.get(id(leaf), leaf) for leaf in leaves], spec)


def is_writable(leaf: object) -> bool:
    """Whether a value is a tensor with data that a forward may change in place."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, Placeholder):
        return False
    if leaf.is_nested or leaf.layout is not torch.strided:
        return False
    return all(step or size < 2 for size, step in zip(leaf.shape, leaf.stride(), strict=True))
