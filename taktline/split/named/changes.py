"""What a forward changes by itself, such as a counter: every stage runs that forward.

Each stage has its own, so that it counts as in the plain model; those of the last stage, which gets
to the end of the forward, are the model's own.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from taktline.errors import PartitionError
from taktline.split.named.mutable import (
    cloned,
    is_constant,
    is_mutable,
    look_at,
    put_back,
    saved,
)
from taktline.split.named.of_transformers import INSTALLED
from taktline.split.named.placeholder import Placeholder, resolved

__all__ = ["HOOKS", "Changes", "follow"]

_SMALL = 1024
"""No forward asks for a number in a buffer that is larger."""
_TABLES = frozenset(vars(nn.Module())) - {"training"} | {INSTALLED}
"""Of parameters, hooks and the like."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The tables of hooks on calls of a module."""


class Changes:
    """The buffers and attributes of some modules, as they were when they were looked at."""

    def __init__(
        self, modules: Mapping[str, nn.Module], names: Container[str] | None = None
    ) -> None:
        """``names`` are those that matter; by default all, and hooks."""
        self._tensors: list[tuple[str, dict[str, Any], str]] = []
        """Names, and places, of buffers and of tensors in attributes."""
        self._attributes: list[tuple[str, dict[str, Any], str]] = []
        """The same of numbers and the like, and of what can be changed in place."""
        self._tables: list[tuple[str, dict[str, Any]]] = []
        """All that they are in, with what their names begin with."""
        self._names = names
        self._modules = modules if names is None else {}
        """Those whose hooks matter."""
        for path, module in modules.items():
            for table in (module._buffers, vars(module)):
                self._tables.append((f"{path}." if path else "", table))
                for name, key in self._named(*self._tables[-1]):
                    value = table[key]
                    # Parameters of other stages lie among the attributes.
                    is_own = table is module._buffers or not isinstance(value, Placeholder)
                    if isinstance(value, torch.Tensor) and is_own:
                        self._tensors.append((name, table, key))
                    elif is_constant(value) or is_mutable(value):
                        self._attributes.append((name, table, key))
        self.look()

    def _named(self, prefix: str, table: dict[str, Any]) -> list[tuple[str, str]]:
        """The names and keys of what is in a table, and matters."""
        return [
            (f"{prefix}{key}", key)
            for key in table
            if key not in _TABLES and (self._names is None or f"{prefix}{key}" in self._names)
        ]

    def look(self) -> None:
        """See how they are."""
        self._keys = [set(table) for _, table in self._tables]
        self._looks = [look_at(table.get(key)) for _, table, key in self._attributes]
        now: list[Any] = [table.get(key) for _, table, key in self._tensors]
        self._before = [(tensor, _version(tensor)) for tensor in now]

    def keep(self) -> None:
        """Look, and keep what is needed to undo all."""
        self.look()
        self._values = [saved(table.get(key)) for _, table, key in self._attributes]
        with _disable_current_modes():
            self._copies = [
                tensor.detach().clone() if _is_small(tensor) else None for tensor, _ in self._before
            ]
        self._hooks = [(table, dict(table)) for table in self._hook_tables()]

    def _hook_tables(self) -> list[dict[int, Any]]:
        """The hooks of the modules."""
        found = {id(module): module for module in self._modules.values()}
        return [vars(module)[key] for module in found.values() for key in HOOKS]

    def changed(self) -> set[str]:
        """The names of those that are others, or have other values, since."""
        attributes = zip(self._attributes, self._looks, strict=True)
        found = {name for (name, table, key), look in attributes if look_at(table.get(key)) != look}
        for (prefix, table), keys in zip(self._tables, self._keys, strict=True):
            found |= {name for name, key in self._named(prefix, table) if key not in keys}
        tensors = zip(self._tensors, self._before, strict=True)
        return found | {
            name
            for (name, table, key), (tensor, version) in tensors
            if table.get(key) is not tensor or _version(tensor) != version
        }

    def undo(self) -> None:
        """Go back to what was kept."""
        for (_, table), keys in zip(self._tables, self._keys, strict=True):
            for key in table.keys() - keys:
                del table[key]
        for (_, table, key), value in zip(self._attributes, self._values, strict=True):
            table[key] = put_back(value)
        for table, before in self._hooks:
            if table != before:  # what is noted of them in attributes is gone, too
                table.clear()
                table.update(before)
        with torch.no_grad(), _disable_current_modes():
            for (_, table, key), (tensor, version), copy in zip(
                self._tensors, self._before, self._copies, strict=True
            ):
                table[key] = tensor
                if copy is not None and _version(tensor) != version:
                    tensor.copy_(copy)

    def separate(self) -> None:
        """Have copies of the tensors, and of what is changed in place."""
        for _, table, key in self._tensors:
            table[key] = table[key].detach().clone()
        for _, table, key in self._attributes:
            table[key] = cloned(table[key])

    def settle(self) -> None:
        """Let tensors that were there have the values of those that took their places."""
        with torch.no_grad():
            for (name, table, key), (tensor, _) in zip(self._tensors, self._before, strict=True):
                now = resolved(table.get(key))
                if isinstance(now, Placeholder):
                    raise PartitionError(
                        f"the forward sets {name!r} to a value of {now.maker!r}, which this stage "
                        "has not; let a submodule keep it"
                    )
                if now is not tensor and _is_like(now, tensor):
                    tensor.copy_(now)
                    table[key] = tensor

    def values(self) -> dict[str, Any]:
        """All of them, by their names."""
        return {
            name: table[key]
            for prefix, table in self._tables
            for name, key in self._named(prefix, table)
        }


def follow(copy: nn.Module, module: nn.Module) -> None:
    """Let the copy of a module have its attributes, and its small buffers."""
    for key, value in vars(module).items():
        if key in _TABLES:
            continue
        if is_constant(value):
            vars(copy)[key] = value
        elif is_mutable(value) and not _is_same(vars(copy), key, value):
            vars(copy)[key] = cloned(value)
    with torch.no_grad():
        for key, buffer in copy._buffers.items():
            now = module._buffers.get(key)
            is_small = buffer is not None and buffer.numel() <= _SMALL
            if is_small and type(now) is torch.Tensor and not isinstance(buffer, Placeholder):
                copy._buffers[key] = now.detach().clone()


def _is_same(table: Mapping[str, Any], key: str, value: Any) -> bool:
    return key in table and look_at(table[key]) == look_at(value)


def _is_small(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.numel() <= _SMALL


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _is_like(now: Any, tensor: torch.Tensor | None) -> bool:
    return (
        isinstance(now, torch.Tensor)
        and tensor is not None
        and not now.requires_grad
        and (now.shape, now.dtype, now.device) == (tensor.shape, tensor.dtype, tensor.device)
    )
