"""Cuts a model into stages that cost about the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import nn

from taktline.checks import check, known_keywords
from taktline.errors import PartitionError
from taktline.plan import Partition, balance
from taktline.split.arguments import Call
from taktline.split.by_names import as_call, stages_of, without_compiler
from taktline.split.costs import Measure, measure_times
from taktline.split.cut import Cut, Record, StepPlacement, starts_of
from taktline.split.record import record_twice
from taktline.split.recorded_stage import CutModel
from taktline.split.stages import Pieces
from taktline.split.without_data import EmptyModel, ancestors, joined
from taktline.text import counted, table

_MATTERS = 10
"""A row counts if it has at least a tenth of the parameters of the largest one."""
_OFTEN = 64
"""A module that is called more often loops over time, or over a list of data."""


@known_keywords
def auto(
    model: nn.Module,
    n: int,
    example: Any,
    *,
    measure: bool = False,
    limits: float | Iterable[float] | None = None,
) -> Pieces:
    """Cut a model into ``n`` stages so that the largest of them costs as little as possible.

    The cuts go through the row of layers (an ``nn.Sequential``, ``nn.ModuleList`` or
    ``nn.ModuleDict``); what comes before and after it counts, too.

    Args:
        model: any module with a row of layers; it may be on the meta device.
        n: how many stages.
        example: a micro-batch: a tuple of arguments, or ``(args, kwargs)``.
        measure: time copies of the layers, forward and backward, instead of counting.
        limits: how many bytes of parameters and buffers a stage may have: one number for all, or
            one for each.

    >>> import torch
    >>> model = nn.Sequential(nn.Embedding(100, 16), *(nn.Linear(16, 16) for _ in range(7)))
    >>> print(auto(model, 2, (torch.zeros(8, dtype=torch.int64),)))
    Pieces(2 stages: 2,416, 1,088 parameters)
    stage  from       layers  operations  bytes
        0  the input       4     441,728  9,664
        1  4               4     450,176  4,352
    """
    check("model", model, nn.Module, "an nn.Module", error=PartitionError)
    n = check("n", n, int, least=1, error=PartitionError)
    measured = check("measure", measure, bool, error=PartitionError)
    return divide(model, n, example, measure_times if measured else None, limits)


def divide(
    model: nn.Module,
    n: int,
    example: Any,
    measure: Measure | None,
    limits: float | Iterable[float] | None = None,
) -> Pieces:
    """Cut a model as :func:`auto` does; ``measure`` returns the times of its layers."""
    model = without_compiler(model)
    call = as_call(model, example)
    empty, record = record_layers(model, call)
    groups, obstacles = list[list[Cut]](), dict[Cut, str]()
    for cut in record.costs:
        if groups and (why := _why_not(record, cut)):
            obstacles[cut] = why
            groups[-1].append(cut)
        else:
            groups.append([cut])
    if len(groups) < n:
        raise _too_many_stages(model, n, list(record.costs), obstacles)
    costs: Mapping[Cut, float] = record.costs
    if measure is not None:
        times = measure(model, {cut.unit for cut in costs}, call)
        costs = {cut: times.get(cut, 0.0) for cut in costs}
    memory = {
        cut: sum(t.nbytes for t in (*unit.parameters(), *unit.buffers()))
        for cut in costs
        for unit in (model.get_submodule(cut.unit),)
    }
    sums = ([sum(map(each.__getitem__, group)) for group in groups] for each in (costs, memory))
    partition = balance(next(sums), n, memory=next(sums), limits=limits)
    stages = [list(chain(*groups[layers])) for layers in partition.slices]
    cuts = [calls[0] for calls in stages[1:]]
    pieces = stages_of(model, CutModel(empty, cuts), call, record)
    # A module that a stage calls several times takes its memory once.
    once = [sum({cut.unit: memory[cut] for cut in calls}.values()) for calls in stages]
    unit = "operations" if measure is None else "milliseconds"
    pieces.division = Division(
        replace(partition, stage_memory=tuple(once)), ("", *map(str, cuts)), unit
    )
    return pieces


def _too_many_stages(
    model: nn.Module, n: int, layers: Sequence[Cut], obstacles: Mapping[Cut, str]
) -> PartitionError:
    """The error for more stages than there are layers with which one can begin."""
    most, why = len(layers) - len(obstacles), ""
    for first, reason in list(obstacles.items())[:1]:
        others = _listed(list(obstacles))
        why = f"; no stage can begin with {others} (with {first!r}: {reason})"
    would_do = f"{most} stages or fewer" if most > 1 else "1 stage"
    return PartitionError(
        f"{type(model).__name__} cannot be cut into {n} stages, but into {would_do}: its forward "
        f"calls {counted(len(layers), 'layer')} ({_listed(layers)}){why}"
    )


def _listed(cuts: Sequence[Cut]) -> str:
    few = [repr(cut) for cut in cuts]
    return ", ".join(few if len(few) < 6 else [*few[:3], "…", few[-1]])


def record_layers(model: nn.Module, call: Call) -> tuple[EmptyModel, Record]:
    """The record of a model whose units are its layers, and what is around them.

    The rows of layers are those with the most parameters that repeat a kind of layer, such as those
    of an encoder and a decoder; rows beside them, such as the groups of blocks of a residual
    network, are opened too. A module that is called several times is several layers. Rows that the
    forward does not call do not count.
    """
    empty = _opened(model, ())
    record = record_twice(empty, call)
    idle = {
        row
        for row in _rows(model)
        if not any(joined(row, key) in record.runs for key in model.get_submodule(row)._modules)
    }
    if idle and len(idle) < sum(map(_is_row, model.modules())):
        empty = _opened(model, (), idle)
        record = record_twice(empty, call)
    if reused := _find_reused(model, record):
        opened = _opened(model, reused, idle)
        with suppress(PartitionError):  # what is around such a module may not be recorded
            return opened, record_twice(opened, call)
    return empty, record


def _why_not(record: Record, cut: Cut) -> str:
    """Why no stage can begin with a call of a unit; empty if one can."""
    if cut.call and record.calls()[cut.unit] > _OFTEN:
        return f"{cut.unit!r} is called more than {_OFTEN} times"
    try:
        StepPlacement(record, starts_of(record, [cut], "the model")).plans()
    except PartitionError as error:
        return str(error)
    return ""


def _opened(model: nn.Module, reused: Collection[str], idle: Collection[str] = ()) -> EmptyModel:
    """A model in which the rows of layers, and what is around them, are containers."""
    rows = [row for row in _rows(model, idle) if not any(_inside(row, name) for name in reused)]
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


def _rows(model: nn.Module, idle: Collection[str] = ()) -> list[str]:
    """The names of the rows of layers: the one with the most parameters, and others that count.

    Without ``idle`` rows, and what is in them.
    """
    rows = {
        name: module
        for name, module in model.named_modules()
        if _is_row(module) and not any(name == row or _inside(name, row) for row in idle)
    }
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


@dataclass(frozen=True, slots=True)
class Division:
    """The cuts of a model, where its stages start, and what they cost in a unit."""

    partition: Partition
    starts: tuple[str, ...]
    unit: str

    def __str__(self) -> str:
        rows = [["stage", "from", "layers", self.unit, "bytes"]]
        cut = self.partition
        for stage, start in enumerate(self.starts):
            numbers = (cut.sizes[stage], cut.stage_costs[stage], (cut.stage_memory or ())[stage])
            rows.append([f"{stage}", start or "the input", *map(_text, numbers)])
        return table(rows, left=["from"])


def _text(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.3g}"
