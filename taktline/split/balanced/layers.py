"""The layers of a model, and at which of them a stage can begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from torch import nn

from taktline.errors import PartitionError
from taktline.split.arguments import Call
from taktline.split.balanced.costs import LayerCosts
from taktline.split.named.containers import ancestors, joined
from taktline.split.named.dry_run import dry_run, find_refused_cuts
from taktline.split.named.forward_summary import Cut
from taktline.split.named.layout import Layout
from taktline.split.named.recurrent import Layer, Layers
from taktline.split.named.units import ROWS

_ROWS: tuple[type, ...] = (*ROWS, Layers)
_MATTERS = 10
"""A row counts if it has at least a tenth of the parameters of the largest one."""
_OFTEN = 64
"""A module that is called more often loops over time, or over a list of data."""


def layer_layout(model: nn.Module, reused: Collection[str] = ()) -> Layout:
    """A layout without cuts, whose units are the layers of a model, and what is around them.

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


def _opened(model: nn.Module, containers: Iterable[str], reused: Iterable[str]) -> Layout:
    """A layout in which some modules, and those around them, are containers."""
    units = [*(_first(model, name) for name in containers), *reused]
    return Layout.of(model, [Cut(name) for name in units]).with_cuts(())


def find_reused(model: nn.Module, seen: LayerCosts) -> list[str]:
    """The modules that are called several times, and count as much as a row of layers.

    Without those that contain a longer row.
    """
    units = Counter(cut.unit for cut in seen.operations)
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


def find_starts(layout: Layout, units: Sequence[Cut], call: Call) -> list[Cut]:
    """The calls of units with which a stage can begin, in order."""
    calls = Counter(cut.unit for cut in units)
    cuts = [cut for cut in units[1:] if not cut.call or calls[cut.unit] <= _OFTEN]
    refused = find_refused_cuts(layout.with_cuts(cuts), *call)
    return [*units[:1], *(cut for cut in cuts if cut not in refused)]


def why_not(layout: Layout, cut: Cut, call: Call) -> str:
    """Why no stage can begin with a call of a unit."""
    try:
        dry_run(layout.with_cuts([cut]), *call)
    except PartitionError as error:
        return str(error)
    return f"{cut.unit!r} is called more than {_OFTEN} times"


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
    kinds = Counter(
        type(layer) for layer in row.children() if _count(layer) or isinstance(layer, Layer)
    )
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
