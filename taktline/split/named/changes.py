"""What a forward itself changes, such as a counter: every stage runs that forward.

Each stage changes its own, so that it counts as in the plain model. Those of the last stage, which
gets to the end of the forward, are the model's.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.errors import PartitionError
from taktline.private import private
from taktline.split.named.hugging_face import INSTALLED
from taktline.split.named.mutable import (
    clone,
    fingerprint,
    is_constant,
    is_mutable,
    restore,
    save,
    version_of,
)
from taktline.split.named.placeholder import Placeholder, resolved

_without_modes = private("torch.utils._python_dispatch._disable_current_modes", "a split by names")

_SMALL = 1024
"""Larger buffers hold no numbers that a forward would read."""
_TABLES = frozenset(vars(nn.Module())) - {"training"} | {INSTALLED}
"""Attributes of every module, such as its tables of parameters and hooks."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The tables of hooks on calls of a module."""


class _Entry(NamedTuple):
    """A value of a module."""

    name: str
    """In the model."""
    table: dict[str, Any]
    key: str
    is_tensor: bool

    def now(self) -> Any:
        """The present value."""
        return self.table.get(self.key)


class Changes:
    """The buffers and attributes of some modules, to find and undo changes."""

    def __init__(
        self, modules: Mapping[str, nn.Module], names: Container[str] | None = None
    ) -> None:
        """Keep the present values; ``names`` are those that matter, by default all, and hooks."""
        self._names = names
        self._modules = modules if names is None else {}
        """The modules whose hooks matter."""
        self._entries: list[_Entry] = []
        self._tables: list[tuple[str, dict[str, Any]]] = []
        """The tables of all modules, with the prefix of their names."""
        for path, module in modules.items():
            for table in (module._buffers, vars(module)):
                self._tables.append((f"{path}." if path else "", table))
                for name, key in self._named(*self._tables[-1]):
                    value = table[key]
                    # Parameters of other stages are placeholders among the attributes.
                    is_own = table is module._buffers or not isinstance(value, Placeholder)
                    is_tensor = isinstance(value, torch.Tensor) and is_own
                    if is_tensor or is_constant(value) or is_mutable(value):
                        self._entries.append(_Entry(name, table, key, is_tensor))
        self.keep()

    def _named(self, prefix: str, table: dict[str, Any]) -> list[tuple[str, str]]:
        """The names and keys of the values in a table that matter."""
        return [
            (f"{prefix}{key}", key)
            for key in table
            if key not in _TABLES and (self._names is None or f"{prefix}{key}" in self._names)
        ]

    def keep(self) -> None:
        """Keep the present values, to compare with them and go back to them later."""
        self._keys = [set(table) for _, table in self._tables]
        self._values = [entry.now() for entry in self._entries]
        self._parts = save(self._values)
        self._fingerprints = [fingerprint(value) for value in self._values]
        with _without_modes():
            self._copies = [
                (tensor, version_of(tensor), tensor.detach().clone())
                for entry, tensor in zip(self._entries, self._values, strict=True)
                if entry.is_tensor and _is_small(tensor)
            ]
        modules = {id(module): module for module in self._modules.values()}
        tables = [vars(module)[key] for module in modules.values() for key in HOOKS]
        self._hooks = [(table, dict(table)) for table in tables]

    def changed(self) -> set[str]:
        """The names whose values have changed since they were kept."""
        entries = zip(self._entries, self._fingerprints, strict=True)
        found = {entry.name for entry, before in entries if fingerprint(entry.now()) != before}
        for (prefix, table), keys in zip(self._tables, self._keys, strict=True):
            found |= {name for name, key in self._named(prefix, table) if key not in keys}
        return found

    def undo(self) -> None:
        """Go back to the values that were kept."""
        for (_, table), keys in zip(self._tables, self._keys, strict=True):
            for key in table.keys() - keys:
                del table[key]
        for table, before in self._hooks:
            if table != before:
                table.clear()
                table.update(before)
        for entry, value in zip(self._entries, self._values, strict=True):
            entry.table[entry.key] = value
        restore(self._parts)
        with torch.no_grad(), _without_modes():
            for tensor, version, copy in self._copies:
                if version_of(tensor) != version:
                    tensor.copy_(copy)

    def separate(self) -> None:
        """Replace tensors and mutable values by copies."""
        for _, table, key, is_tensor in self._entries:
            table[key] = table[key].detach().clone() if is_tensor else clone(table[key])

    def write_through(self) -> None:
        """Copy the value of a tensor that has replaced a kept one into that, and put it back."""
        with torch.no_grad():
            for entry, tensor in zip(self._entries, self._values, strict=True):
                now = resolved(entry.now())
                if not entry.is_tensor or now is tensor:
                    continue
                if isinstance(now, Placeholder):
                    raise PartitionError(
                        f"the forward sets {entry.name!r} to a value of {now.maker!r}, which this "
                        "stage does not have; set it in a submodule"
                    )
                if _is_like(now, tensor):
                    tensor.copy_(now)
                    entry.table[entry.key] = tensor

    def values(self) -> dict[str, Any]:
        """The present values by name."""
        return {
            name: table[key]
            for prefix, table in self._tables
            for name, key in self._named(prefix, table)
        }

    def fingerprints(self) -> dict[str, Any]:
        """Summaries of the present values by name; small tensors are compared by their data."""
        return {name: fingerprint(value, _by_data) for name, value in self.values().items()}


def copy_attributes(copy: nn.Module, module: nn.Module) -> None:
    """Give the copy of a module the present attributes and small buffers of the module."""
    for key, value in vars(module).items():
        if key in _TABLES:
            continue
        if is_constant(value):
            vars(copy)[key] = value
        elif is_mutable(value) and (
            key not in vars(copy) or fingerprint(vars(copy)[key]) != fingerprint(value)
        ):
            vars(copy)[key] = clone(value)
    with torch.no_grad():
        for key, buffer in copy._buffers.items():
            now = module._buffers.get(key)
            is_own = _is_small(buffer) and not isinstance(buffer, Placeholder)
            if is_own and type(now) is torch.Tensor:
                copy._buffers[key] = now.detach().clone()


def _is_small(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() <= _SMALL


def _is_like(now: Any, tensor: Any) -> bool:
    return (
        isinstance(now, torch.Tensor)
        and isinstance(tensor, torch.Tensor)
        and not now.requires_grad
        and (now.shape, now.dtype, now.device) == (tensor.shape, tensor.dtype, tensor.device)
    )


def _by_data(tensor: torch.Tensor) -> Any:
    is_here = not isinstance(tensor, Placeholder) and not tensor.is_meta
    if is_here and _is_small(tensor):
        return str(tensor.tolist())
    return (is_here, tuple(tensor.shape), tensor.dtype, tensor._version if is_here else 0)
