"""Cuts a model into stages that cost about the same."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn

from taktline.checks import check
from taktline.device import keep_generators
from taktline.errors import PartitionError, text_of
from taktline.plan import Partition, balance
from taktline.side_values import SideValues
from taktline.split.by_names import Pieces, as_call, stages_of, without_compiler
from taktline.split.costs import OperationCounter
from taktline.split.cut import StepPlacement, record_twice, starts_of
from taktline.split.recorded_stage import CutModel
from taktline.split.steps import Call, Cut, Record, Step, all_tensors, filled
from taktline.split.without_data import EmptyModel, ancestors, joined
from taktline.text import counted, table

Measure: TypeAlias = Callable[[nn.Module, Record], Mapping[Cut, float]]
"""Returns the time of each call of a unit of a model, in milliseconds."""
_MATTERS = 10
"""A row counts if it has at least a tenth of the parameters of the largest one."""
_OFTEN = 64
"""A module that is called more often loops over time, or over a list of data."""


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
    n: int | None,
    example: Any,
    measure: Measure | None,
    limits: float | Iterable[float] | None = None,
) -> Pieces:
    """Cut a model as :func:`auto` does; ``measure`` returns the times of its layers.

    Without a number there are as many stages as there can be.
    """
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
    n = len(groups) if n is None else n
    if len(groups) < n:
        why = [f"; no stage can begin with {cut!r}: {why}" for cut, why in obstacles.items()]
        raise PartitionError(
            f"{type(model).__name__} cannot be cut into {n} stages, but into "
            f"{counted(len(groups), 'stage')} or fewer: its forward calls "
            f"{counted(len(record.costs), 'layer')}{''.join(why[:1])}"
        )
    costs: Mapping[Cut, float] = record.costs
    if measure is not None:
        times = measure(model, record)
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
    return EmptyModel(model, [Cut(name) for name in (*firsts, *reused)], counter=OperationCounter)


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
    kinds = {name: Counter(type(x) for x in rows[name].children() if _count(x)) for name in sizes}
    repeating = [name for name in sizes if max(kinds[name].values()) > 1]
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


# The time that layers take

_RUNS = (5, 20)
"""The fewest and the most runs of a call; of a quick one there are more."""
_ENOUGH = 20.0
"""The milliseconds after which there need not be more."""
_clock = time.perf_counter


def measure_times(
    model: nn.Module, record: Record, device: torch.device | None = None
) -> dict[Cut, float]:
    """The time of each call of a unit, forward and backward, in milliseconds.

    Copies of the units run, one at a time, on ``device``, with arguments as in the record: random
    floats, and zeros. So the model need not fit there, and stays as it is.
    """
    here = next((part.device for part in model.parameters()), torch.device("cpu"))
    device = device or (torch.device("cpu") if here.type == "meta" else here)
    try:
        with keep_generators([here, device]):
            return {
                Cut(step.target, step.call): _time(model, step, device)
                for step in record.steps
                if step.kind == "unit"
            }
    except Exception as error:  # the model's code may raise anything
        raise PartitionError(
            f"the layers of {type(model).__name__} cannot be measured: {type(error).__name__}: "
            f"{text_of(error)}; leave out measure=True, or say where to cut"
        ) from error


def _time(model: nn.Module, step: Step, device: torch.device) -> float:
    """The shortest time of a call of a unit, in a few runs after one to warm up."""
    unit = model.get_submodule(step.target)
    tensors = (*unit.parameters(), *unit.buffers())
    made = copy.deepcopy(unit, {id(part): _there(part, device) for part in tensors})
    kinds = {value: value.absent for value in step.reads}
    empty = {v: torch.empty(a.shape, dtype=a.dtype, device="meta") for v, a in kinds.items()}
    given: dict[Any, Any] = {s: model.get_parameter(s.name) for s in step.states if s.is_parameter}
    given |= {s: model.get_buffer(s.name) for s in step.states if not s.is_parameter} | empty
    took: list[float] = []
    fewest, most = _RUNS
    while len(took) <= fewest or (len(took) <= most and sum(took[1:]) < _ENOUGH):
        values = {key: _there(part, device) for key, part in given.items()}
        for value in values.values() if step.needs_backward else ():
            value.requires_grad_(value.is_floating_point() or value.is_complex())
        args, kwargs = filled((step.args, step.kwargs), {k: v.clone() for k, v in values.items()})
        with SideValues(0, {}), torch.enable_grad():
            start = _now(device)
            output = made(*args, **kwargs)
            parts = [part for part in all_tensors(output) if part.requires_grad]
            if parts:
                torch.autograd.backward(parts, [torch.ones_like(part) for part in parts])
            took.append(_now(device) - start)
    return min(took[1:])


def _there(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device, with random floats, or zeros of other types, if there are no values."""
    if not tensor.is_meta:
        made = tensor.detach().to(device, copy=True)
    else:
        made = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device=device)
        if made.is_floating_point():
            made.normal_(0, 0.1)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made


def _now(device: torch.device) -> float:
    """The time in milliseconds, once the device has done its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return 1e3 * _clock()
