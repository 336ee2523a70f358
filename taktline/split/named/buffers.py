"""Buffers that a forward changes by itself, such as a counter: every stage runs that forward.

Each stage has its own, so that it counts as in the plain model; those of the last stage, which gets
to the end of the forward, are the model's own.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Buffers"]

_SMALL = 1024


class Buffers:
    """The buffers of some modules, as they were when they were looked at."""

    def __init__(
        self, modules: Mapping[str, nn.Module], names: Container[str] | None = None
    ) -> None:
        """``names`` are those that matter; by default all."""
        places = [
            (f"{path}.{key}" if path else key, module._buffers, key)
            for path, module in modules.items()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._places = [place for place in places if names is None or place[0] in names]
        self.look()

    def look(self) -> None:
        """See how they are."""
        now = [table[key] for _, table, key in self._places]
        self._before: list[tuple[Any, int]] = [(buffer, _version(buffer)) for buffer in now]

    def changed(self) -> set[str]:
        """The names of those that are others, or have other values, since."""
        return {
            name
            for (name, table, key), (buffer, version) in zip(
                self._places, self._before, strict=True
            )
            if table.get(key) is not buffer or _version(buffer) != version
        }

    def separate(self) -> None:
        """Have copies."""
        for _, table, key in self._places:
            table[key] = table[key].clone()  # pyright: ignore[reportOptionalMemberAccess]

    def values(self) -> list[torch.Tensor | None]:
        """Copies, to go back to; not of large ones, which no forward asks for a number."""
        return [buffer.clone() if buffer.numel() <= _SMALL else None for buffer, _ in self._before]

    def restore(self, values: Iterable[torch.Tensor | None]) -> None:
        """Go back, to the tensors that were there and their values."""
        with torch.no_grad(), _disable_current_modes():
            for (_, table, key), (buffer, version), value in zip(
                self._places, self._before, values, strict=True
            ):
                table[key] = buffer
                if value is not None and _version(buffer) != version:
                    buffer.copy_(value)

    def settle(self) -> None:
        """Let tensors that were there have the values of those that took their places."""
        with torch.no_grad():
            for (_, table, key), (buffer, _) in zip(self._places, self._before, strict=True):
                now = table.get(key)
                if now is not buffer and _fits(now, buffer):
                    buffer.copy_(now)
                    table[key] = buffer


def _version(buffer: torch.Tensor | None) -> int:
    return 0 if buffer is None or buffer.is_inference() else buffer._version


def _fits(now: torch.Tensor | None, buffer: torch.Tensor | None) -> bool:
    return (
        now is not None
        and buffer is not None
        and not now.requires_grad
        and (now.shape, now.dtype, now.device) == (buffer.shape, buffer.dtype, buffer.device)
    )
