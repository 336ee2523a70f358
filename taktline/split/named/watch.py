"""Calls of what is inside of units, by a forward that does not call the unit itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from taktline.split.named.placeholder import here

__all__ = ["inner_of", "watching"]


@contextmanager
def watching(context: Any, names: Mapping[int, str]) -> Iterator[None]:
    """Have a forward note calls of modules, which are known by their ids, outside of units."""

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
