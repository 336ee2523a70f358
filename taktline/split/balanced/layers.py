"""The layers of a model, and at which of them a stage can begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from torch import nn

from taktline.errors import PartitionError
from taktline.split.cut import Placement
from taktline.split.empty_model import EmptyModel, ancestors, joined
from taktline.split.steps import Cut, Record

_ROWS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MATTERS = 10
"""A row counts if it has at least a tenth of the parameters of the largest one."""
_OFTEN = 64
"""A module that is called more often loops over time, or over a list of data."""


def open_layers(model: nn.Module, reused: Collection[str] = ()) -> EmptyModel:
    """A model without data, whose units are the layers of a model, and what is around them.

    The rows of layers are those with the most parameters that repeat a kind of layer, such as those
    of an encoder and a decoder; rows beside them, such as the groups of blocks of a residual
    network, are opened too::

        stem    group1        group2        head
                ├── 0         ├── 0               units: stem, group1.0, group1.1,
                └── 1         └── 1                      group2.0, group2.1, head

    Modules that are called several times (``reused``) are layers, too; see :func:`find_reused`.
    """
    rows = [row for row in _rows(model) if not any(_inside(row, name) for name in reused)]
    if not rows:
        return _opened(model, [] if reused else [_spine(model)], reused)
    opened = list(rows)
    for row in rows:
        path = ancestors(row)
        for parent in path:
            for key, child in model.get_submodule(parent).named_children():
                name = joined(parent, key)
                if isinstance(child, _ROWS) and _length(child) > 1 and name not in (*path, *opened):
                    opened.append(name)
    return _opened(model, opened, reused)


def _opened(model: nn.Module, containers: Iterable[str], reused: Iterable[str]) -> EmptyModel:
    """A model without data in which some modules, and those around them, are containers."""
    units = [*(_first(model, name) for name in containers), *reused]
    return EmptyModel(model, [Cut(name) for name in units])


def find_reused(model: nn.Module, seen: Record) -> list[str]:
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
    sizes = {row: _count(model.get_submodule(row)) for row in _rows(model)}
    largest = max(sizes.values(), default=0)
    return [
        name
        for name, times in found.items()
        if _count(model.get_submodule(name)) * times * _MATTERS > largest
        and not any(
            _inside(row, name) and _length(model.get_submodule(row)) > times for row in sizes
        )
    ]


def find_starts(record: Record, units: Sequence[Cut]) -> list[Cut]:
    """The calls of units with which a stage can begin, in order."""
    return [*units[:1], *(cut for cut in units[1:] if not why_not(record, cut))]


def why_not(record: Record, cut: Cut) -> str:
    """Why no stage can begin with a call of a unit; empty if one can."""
    if cut.call and record.calls()[cut.unit] > _OFTEN:
        return f"{cut.unit!r} is called more than {_OFTEN} times"
    try:
        Placement(record, [cut], "the model").plans()
    except PartitionError as error:
        return str(error)
    return ""


def _rows(model: nn.Module) -> list[str]:
    """The names of the rows of layers: the one with the most parameters, and others that count."""
    rows = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _ROWS) and _length(module) > 1 and _count(module)
    }
    repeating = [name for name, row in rows.items() if _repeats(row)]
    # A row inside of a layer, such as the experts of a block, does not count.
    outer = [name for name in repeating if not any(_inside(name, other) for other in repeating)]
    sizes = {name: _count(rows[name]) for name in outer or rows}
    largest = max(sizes.values(), default=0)
    if not outer:
        return [name for name, size in sizes.items() if size == largest][:1]
    return [name for name, size in sizes.items() if size * _MATTERS >= largest]


def _spine(model: nn.Module) -> str:
    """The innermost module that contains all others: cuts go between its submodules."""
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
                f"{type(model).__name__} has no list of layers (nn.Sequential, nn.ModuleList or "
                "nn.ModuleDict) and no submodules in sequence to cut; use by_names, or split "
                "points in taktline.pipeline, or cut it by hand"
            )
        name = joined(name, children[0][0])


def _repeats(row: nn.Module) -> bool:
    kinds = Counter(type(layer) for layer in row.children() if _count(layer))
    return max(kinds.values(), default=0) > 1


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _length(row: nn.Module) -> int:
    return len(row._modules)


def _inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _first(model: nn.Module, row: str) -> str:
    key = next(key for key, _ in model.get_submodule(row).named_children())
    return joined(row, key)
