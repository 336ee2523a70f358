"""The layers of a model: the longest rows that a cut can go through, and where it can."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from taktline.errors import PartitionError
from taktline.split.named.skeleton import Skeleton, joined
from taktline.split.named.walk import walk

__all__ = ["find_starts", "layered"]

_ROWS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MATTERS = 10
"""A row matters that has at least such a part of the parameters of the largest one."""


def layered(model: nn.Module) -> Skeleton:
    """A skeleton whose units are the layers of a model, with what comes before and after them.

    The rows of layers are those with the most parameters that repeat a kind of layer, such as those
    of an encoder and a decoder; rows beside them, such as the groups of blocks of a residual
    network, are opened too::

        stem    group1        group2        head
                ├── 0         ├── 0               units: stem, group1.0, group1.1,
                └── 1         └── 1                      group2.0, group2.1, head
    """
    rows = _rows(model)
    if not rows:
        return _opened(model, [_spine(model)])
    opened = list(rows)
    for row in rows:
        parts = row.split(".") if row else []
        path = [".".join(parts[:depth]) for depth in range(len(parts))]
        for parent in path:
            for key, child in model.get_submodule(parent).named_children():
                name = joined(parent, key)
                if isinstance(child, _ROWS) and len(child) > 1 and name not in (*path, *opened):
                    opened.append(name)
    return _opened(model, opened)


def _opened(model: nn.Module, containers: list[str]) -> Skeleton:
    """A skeleton in which some modules, and what they are in, are containers."""
    skeleton = Skeleton.of(model, [_first(model, name) for name in containers])
    skeleton.cuts = ()
    return skeleton


def find_starts(skeleton: Skeleton, units: list[str], call: Any) -> list[str]:
    """Those of the units, in the order of their calls, with which a stage can begin."""
    starts = units[:1]
    for name in units[1:]:
        skeleton.cuts = (name,)
        try:
            walk(skeleton, *call)
        except PartitionError:
            continue
        finally:
            skeleton.cuts = ()
        starts.append(name)
    return starts


def _rows(model: nn.Module) -> list[str]:
    """The names of the rows of layers: the one with the most parameters, and others that matter."""
    rows = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _ROWS) and len(module) > 1 and any(True for _ in module.parameters())
    }
    repeating = [name for name, row in rows.items() if _repeats(row)]
    # A row inside of a layer, such as the experts of a block, is none of the model's.
    outer = [name for name in repeating if not any(_inside(name, other) for other in repeating)]
    sizes = {name: sum(p.numel() for p in rows[name].parameters()) for name in outer or rows}
    largest = max(sizes.values(), default=0)
    if not outer:
        return [name for name, size in sizes.items() if size == largest][:1]
    return [name for name, size in sizes.items() if size * _MATTERS >= largest]


def _spine(model: nn.Module) -> str:
    """The innermost module that has all others in it: its submodules are what can be cut."""
    name = ""
    while True:
        children = [
            (key, child)
            for key, child in model.get_submodule(name).named_children()
            if any(True for _ in child.parameters())
        ]
        if len(children) > 1:
            return name
        if not children or not any(True for _ in children[0][1].children()):
            raise PartitionError(
                f"{type(model).__name__} has no row of layers (nn.Sequential, nn.ModuleList or "
                "nn.ModuleDict) and no submodules one after the other to cut; say where with "
                "by_names, or with split points in taktline.pipeline, or cut it by hand"
            )
        name = joined(name, children[0][0])


def _repeats(row: nn.Module) -> bool:
    kinds = Counter(
        type(layer) for layer in row.children() if any(True for _ in layer.parameters())
    )
    return max(kinds.values(), default=0) > 1


def _inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _first(model: nn.Module, row: str) -> str:
    key = next(key for key, _ in model.get_submodule(row).named_children())
    return joined(row, key)
