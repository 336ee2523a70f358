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

from taktline.split.named.placeholder import Placeholder
from taktline.split.named.twin import is_constant

__all__ = ["Changes", "follow"]

_SMALL = 1024
"""No forward asks for a number in a buffer that is larger."""


class Changes:
    """The buffers and attributes of some modules, as they were when they were looked at."""

    def __init__(
        self, modules: Mapping[str, nn.Module], names: Container[str] | None = None
    ) -> None:
        """``names`` are those that matter; by default all."""

        def places(tables: Mapping[str, Any], chosen: Any) -> list[tuple[str, Any, str]]:
            found = [
                (f"{path}.{key}" if path else key, table, key)
                for path, table in tables.items()
                for key, value in table.items()
                if chosen(value)
            ]
            return [place for place in found if names is None or place[0] in names]

        tables = {path: module._buffers for path, module in modules.items()}
        self._buffers = places(tables, lambda value: value is not None)
        self._attributes = places({p: vars(m) for p, m in modules.items()}, is_constant)
        self.look()

    def look(self) -> None:
        """See how they are."""
        self._values = [table.get(key) for _, table, key in self._attributes]
        now: list[Any] = [table.get(key) for _, table, key in self._buffers]
        self._before = [(buffer, _version(buffer)) for buffer in now]

    def keep(self) -> None:
        """Look, and keep what is needed to undo all."""
        self.look()
        with _disable_current_modes():
            self._copies = [
                buffer.clone() if buffer is not None and buffer.numel() <= _SMALL else None
                for buffer, _ in self._before
            ]

    def changed(self) -> set[str]:
        """The names of those that are others, or have other values, since."""
        attributes = zip(self._attributes, self._values, strict=True)
        found = {name for (name, table, key), old in attributes if table.get(key) != old}
        buffers = zip(self._buffers, self._before, strict=True)
        return found | {
            name
            for (name, table, key), (buffer, version) in buffers
            if table.get(key) is not buffer or _version(buffer) != version
        }

    def undo(self) -> None:
        """Go back to what was kept."""
        for (_, table, key), value in zip(self._attributes, self._values, strict=True):
            table[key] = value
        with torch.no_grad(), _disable_current_modes():
            for (_, table, key), (buffer, version), copy in zip(
                self._buffers, self._before, self._copies, strict=True
            ):
                table[key] = buffer
                if copy is not None and _version(buffer) != version:
                    buffer.copy_(copy)

    def separate(self) -> None:
        """Have copies of the buffers."""
        for _, table, key in self._buffers:
            table[key] = table[key].clone()

    def settle(self) -> None:
        """Let buffers that were there have the values of those that took their places."""
        with torch.no_grad():
            for (_, table, key), (buffer, _) in zip(self._buffers, self._before, strict=True):
                now = table.get(key)
                if now is not buffer and _is_like(now, buffer):
                    buffer.copy_(now)
                    table[key] = buffer


def follow(copy: nn.Module, module: nn.Module) -> None:
    """Let the copy of a module have its attributes, and its small buffers."""
    for key, value in vars(module).items():
        if is_constant(value):
            vars(copy)[key] = value
    with torch.no_grad():
        for key, buffer in copy._buffers.items():
            now = module._buffers.get(key)
            is_small = buffer is not None and buffer.numel() <= _SMALL
            if is_small and type(now) is torch.Tensor and not isinstance(buffer, Placeholder):
                copy._buffers[key] = now.detach().clone()


def _version(buffer: torch.Tensor | None) -> int:
    return 0 if buffer is None or buffer.is_inference() else buffer._version


def _is_like(now: torch.Tensor | None, buffer: torch.Tensor | None) -> bool:
    return (
        now is not None
        and buffer is not None
        and not now.requires_grad
        and (now.shape, now.dtype, now.device) == (buffer.shape, buffer.dtype, buffer.device)
    )
