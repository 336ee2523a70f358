"""The layers of a model, and at which of them a stage can begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import nn

from taktline.errors import PartitionError
from taktline.split.arguments import Call
from taktline.split.cut import Placement
from taktline.split.empty_model import EmptyModel, ancestors, joined
from taktline.split.repeat import record_twice
from taktline.split.steps import Cut, Record

_MATTERS = 10
"""A row counts if it has at least a tenth of the parameters of the largest one."""
_OFTEN = 64
"""A module that is called more often loops over time, or over a list of data."""


def record_layers(model: nn.Module, call: Call) -> tuple[EmptyModel, Record]:
    """The record of a model whose units are its layers, and what is around them.

    The rows of layers are those with the most parameters that repeat a kind of layer, such as those
    of an encoder and a decoder; rows beside them, such as the groups of blocks of a residual
    network, are opened too::

        stem    group1        group2        head
                ├── 0         ├── 0               units: stem, group1.0, group1.1,
                └── 1         └── 1                      group2.0, group2.1, head

    A module that is called several times is several layers.
    """
    empty = _opened(model, ())
    record = record_twice(empty, call)
    if reused := _find_reused(model, record):
        empty = _opened(model, reused)
        record = record_twice(empty, call)
    return empty, record


def why_not(record: Record, cut: Cut) -> str:
    """Why no stage can begin with a call of a unit; empty if one can."""
    if cut.call and record.calls()[cut.unit] > _OFTEN:
        return f"{cut.unit!r} is called more than {_OFTEN} times"
    try:
        Placement(record, [cut], "the model").plans()
    except PartitionError as error:
        return str(error)
    return ""


def _opened(model: nn.Module, reused: Collection[str]) -> EmptyModel:
    """A model in which the rows of layers, and what is around them, are containers."""
    rows = [row for row in _rows(model) if not any(_inside(row, name) for name in reused)]
    opened = dict.fromkeys(rows if rows or reused else [_spine(model)])
    for row in rows:
        path = ancestors(row)
        for parent in path:
            for key, child in model.get_submodule(parent).named_children():
                if _is_row(child) and joined(parent, key) not in path:
                    opened[joined(parent, key)] = None
    firsts = [joined(name, next(iter(model.get_submodule(name)._modules))) for name in opened]
    return EmptyModel(model, [Cut(name) for name in (*firsts, *reused)])


def _find_reused(model: nn.Module, seen: Record) -> list[str]:
    """The modules that are called several times, and count as much as a row of layers.

    Without those that contain a longer row.
    """
    units = seen.calls()
    found: dict[str, int] = {}
    for name, calls in sorted(seen.runs.items()):
        around = [part for part in ancestors(name) if part in seen.runs]
        times = units[name] or calls // (seen.runs[around[-1]] if around else 1)
        if 1 < times <= _OFTEN and not any(part in found for part in around):
            found[name] = times
    rows = {row: model.get_submodule(row) for row in _rows(model)}
    largest = max(map(_count, rows.values()), default=0)
    return [
        name
        for name, times in found.items()
        if _count(model.get_submodule(name)) * times * _MATTERS > largest
        and not any(_inside(row, name) and len(rows[row]._modules) > times for row in rows)
    ]


def _rows(model: nn.Module) -> list[str]:
    """The names of the rows of layers: the one with the most parameters, and others that count."""
    rows = {name: module for name, module in model.named_modules() if _is_row(module)}
    sizes = {name: size for name, row in rows.items() if (size := _count(row))}
    repeating = [name for name in sizes if _repeats(rows[name])]
    # A row inside of a layer, such as the experts of a block, does not count.
    outer = [name for name in repeating if not any(_inside(name, other) for other in repeating)]
    if not outer:
        return sorted(sizes, key=lambda name: -sizes[name])[:1]
    largest = max(sizes[name] for name in outer)
    return [name for name in outer if sizes[name] * _MATTERS >= largest]


def _spine(model: nn.Module) -> str:
    """The innermost module that contains all others: cuts go between its submodules."""
    name = ""
    while True:
        module = model.get_submodule(name)
        children = [key for key, child in module.named_children() if _count(child)]
        if len(children) > 1:
            return name
        if not children:
            raise PartitionError(
                f"{type(model).__name__} has no list of layers (nn.Sequential, nn.ModuleList or "
                "nn.ModuleDict) and no submodules in sequence to cut; use by_names, or split "
                "points in taktline.pipeline, or cut it by hand"
            )
        name = joined(name, children[0])


def _is_row(module: nn.Module) -> bool:
    kinds = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    return isinstance(module, kinds) and len(module._modules) > 1


def _repeats(row: nn.Module) -> bool:
    kinds = Counter(type(layer) for layer in row.children() if _count(layer))
    return max(kinds.values(), default=0) > 1


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))
