"""Calls of what is inside of units, by a forward that does not call the unit itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from taktline.split.named.placeholder import here

__all__ = ["inner_of", "watching"]


class _Watching(Protocol):
    is_inside: bool
    """Whether a unit runs, so that what is in it is its own affair."""

    def note_inner(self, name: str) -> None:
        """Note a call of what is inside of a unit."""


@contextmanager
def watching(context: _Watching, names: Mapping[int, str]) -> Iterator[None]:
    """Have a context note calls of modules, which are known by their ids."""

    def note(module: nn.Module, args: Any) -> None:
        if here.context is context and not context.is_inside and id(module) in names:
            context.note_inner(names[id(module)])

    hook = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        hook.remove()


def inner_of(units: Mapping[str, nn.Module]) -> dict[int, str]:
    """The names of all that is inside of some units, by their ids."""
    return {
        id(module): f"{unit}.{name}"
        for unit, whole in units.items()
        for name, module in nn.Module.named_modules(whole)
        if name
    }
