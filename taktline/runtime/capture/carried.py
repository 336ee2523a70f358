"""Tensors that a forward keeps in attributes of its module, for the next one to read.

A graph works on fixed memory, so they are copied into it and out of it::

    def forward(self, x):
        y = self.layer(x - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)

    self.mean ──copy──▶ buffer ──▶ graph ──▶ result ──copy──▶ self.mean
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import nn

from taktline import pytree
from taktline.runtime.capture.module_state import Attribute
from taktline.stage import PipelineStage


@dataclass(slots=True)
class _Value:
    """An attribute of a module: a tensor, a container, or any other value."""

    module: nn.Module
    name: str
    buffers: list[torch.Tensor] = field(default_factory=list)
    """Copies of its tensors, which the graph reads."""
    result: Any = None
    """The value that the captured program leaves."""

    @property
    def table(self) -> dict[str, Any]:
        """The attributes of the module."""
        return vars(self.module)

    @property
    def value(self) -> Any:
        """The current value; None if there is none."""
        return self.table.get(self.name)


def _found(changing: Collection[Attribute]) -> list[_Value]:
    return [_Value(module, name) for weak, name in changing if (module := weak()) is not None]


def kind_of(changing: Collection[Attribute]) -> tuple[object, ...]:
    """The structures, shapes and types of tensors in attributes, for which a graph is made."""
    kinds: list[object] = []
    for place, kept in enumerate(_found(changing)):
        leaves, spec = pytree.tree_flatten(kept.value)
        if any(map(_is_tensor, leaves)):
            kinds.append((place, "" if spec.is_leaf() else str(spec), *map(_kind, leaves)))
    return tuple(kinds)


class Carried:
    """The attributes that forwards change, in one graph."""

    def __init__(self, changing: Collection[Attribute], stages: Sequence[PipelineStage]) -> None:
        self._kept = _found(changing)
        self._stages = stages
        for kept in self._kept:
            if _tensors(kept.value):
                kept.table[kept.name] = _detached(kept.value)

    @contextmanager
    def lent(self, reasons: list[str]) -> Iterator[None]:
        """Inside, the attributes are the buffers; adds reasons against the capture."""
        before = [(kept, kept.value) for kept in self._kept if kept.name in kept.table]
        for kept, value in before:
            kept.table[kept.name] = lent = pytree.tree_map_only(torch.Tensor, torch.clone, value)
            kept.buffers = _tensors(lent)
        try:
            yield
            for kept in self._kept:
                kept.result = _detached(kept.value)
                reasons += self._misplaced(kept)
        finally:
            for kept in self._kept:
                kept.table.pop(kept.name, None)
            for kept, value in before:
                kept.table[kept.name] = value
        self._kept = [kept for kept in self._kept if _tensors((kept.buffers, kept.result))]

    def _misplaced(self, kept: _Value) -> list[str]:
        """Why the captured program cannot change an attribute, with its stage; empty if it can."""
        owners = (each for each in self._stages if kept.module in each.submod.modules())
        owner = next((f"stage {each.stage_index}" for each in owners), "loss_fn")
        device = self._stages[0].device
        return [
            f"{owner}: its forward changes {kept.name!r}, which is on {tensor.device}; keep it on "
            f"{device}"
            for tensor in _tensors(kept.result)
            if tensor.device.type != device.type
        ]

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the attributes into the buffers, before a replay."""
        for kept in self._kept:
            for buffer, tensor in zip(kept.buffers, _tensors(kept.value), strict=True):
                buffer.copy_(tensor)

    def hand_over(self) -> None:
        """Set the attributes to copies of the results, after a replay."""
        made: dict[int, torch.Tensor] = {}
        for kept in self._kept:
            pairs = zip(kept.buffers, _tensors(kept.value), strict=True)
            made |= {id(buffer): tensor for buffer, tensor in pairs}  # not replaced

        def copy(leaf: Any) -> Any:
            if _is_tensor(leaf) and id(leaf) not in made:
                made[id(leaf)] = leaf.clone()
            return made[id(leaf)] if _is_tensor(leaf) else leaf

        for kept in self._kept:
            kept.table[kept.name] = pytree.tree_map(copy, kept.result)


def _detached(tree: Any) -> Any:
    """Tensors without their graphs: nodes of parameters in these belong to another stream."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.detach() if x.requires_grad else x, tree)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if _is_tensor(leaf)]


def _is_tensor(leaf: object) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor)


def _kind(leaf: object) -> object:
    return (type(leaf), leaf.dtype, leaf.shape, leaf.device) if _is_tensor(leaf) else type(leaf)
