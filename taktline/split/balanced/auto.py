"""Cuts a model into stages that cost about the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import nn

from taktline.checks import known_keywords, require_flag, require_instance, require_whole
from taktline.errors import PartitionError
from taktline.plan import Partition, balance
from taktline.split.arguments import Call
from taktline.split.balanced.layers import find_reused, find_starts, open_layers, why_not
from taktline.split.balanced.times import Measure, measure_times
from taktline.split.by_names import as_call, example_call, pieces_of, without_compiler
from taktline.split.empty_model import EmptyModel
from taktline.split.record import record_twice
from taktline.split.stages import Pieces
from taktline.split.steps import Cut, Record
from taktline.text import counted, table


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
    ``nn.ModuleDict``); what comes before and after it, such as the embedding and the head, counts,
    too. :func:`taktline.plan.balance` finds the cuts, and :func:`by_names` makes them.

    Args:
        model: any module with a row of layers; it may be on the meta device.
        n: how many stages.
        example: a micro-batch: a tuple of arguments, or ``(args, kwargs)``.
        measure: time copies of the layers, forward and backward, instead of counting.
        limits: how many bytes of parameters and buffers a stage may have: one number for all, or
            one for each.

    >>> import torch
    >>> from taktline.split import auto
    >>> model = nn.Sequential(nn.Embedding(100, 16), *(nn.Linear(16, 16) for _ in range(6)))
    >>> _ = model.append(nn.Linear(16, 100))
    >>> print(auto(model, 3, (torch.zeros(8, dtype=torch.int64),)))
    Pieces(3 stages: 2,144, 816, 1,972 parameters)
    stage  from       layers  operations  bytes
        0  the input       3     329,184  8,576
        1  3               3     337,632  3,264
        2  6               2     280,192  7,888
    """
    require_instance("model", model, nn.Module, "an nn.Module", PartitionError)
    n = require_whole("n", n, least=1, error=PartitionError)
    measured = require_flag("measure", measure, PartitionError)
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
    call = example_call(model, as_call(model, example))
    empty, record = _record(model, call)
    costs: Mapping[Cut, float] = record.costs
    starts = find_starts(record, list(costs))
    if len(starts) < n:
        raise _too_many_stages(model, n, record, list(costs), starts)
    if measure is not None:
        times = measure(model, {cut.unit for cut in costs}, call)
        costs = {cut: times.get(cut, 0.0) for cut in costs}
    memory = {cut: _bytes_of(model.get_submodule(cut.unit)) for cut in costs}
    groups = _grouped(list(costs), starts[1:])
    partition = balance(_sums(costs, groups), n, memory=_sums(memory, groups), limits=limits)
    cuts = [starts[bound] for bound in partition.bounds[1:-1]]
    pieces = pieces_of(model, empty, cuts, call, record)
    # A module that a stage calls several times takes its memory once.
    once = [{cut.unit: memory[cut] for cut in calls} for calls in _grouped(list(memory), cuts)]
    partition = replace(partition, stage_memory=tuple(sum(sizes.values()) for sizes in once))
    unit = "operations" if measure is None else "milliseconds"
    pieces.division = Division(partition, ("", *map(str, cuts)), unit)
    return pieces


def _record(model: nn.Module, call: Call) -> tuple[EmptyModel, Record]:
    """The recorded layers of a model; a module that is called again is several layers."""
    empty = open_layers(model)
    record = record_twice(empty, call)
    if reused := find_reused(model, record):
        empty = open_layers(model, reused)
        record = record_twice(empty, call)
    return empty, record


def _bytes_of(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


@dataclass(frozen=True, slots=True)
class Division:
    """The cuts of a model, and the costs of its stages.

    Args:
        partition: how many layers each stage has, and their costs.
        starts: the submodule with which each stage begins; the first begins with the model.
        unit: the unit of the costs.
    """

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


def _too_many_stages(
    model: nn.Module,
    n: int,
    record: Record,
    layers: Sequence[Cut],
    starts: Sequence[Cut],
) -> PartitionError:
    """The error for more stages than there are layers with which one can begin."""
    others = [cut for cut in layers if cut not in starts]
    why = ""
    if others:
        reason = why_not(record, others[0])
        why = f"; no stage can begin with {_listed(others)} (with {others[0]!r}: {reason})"
    would_do = f"{len(starts)} stages or fewer" if len(starts) > 1 else "1 stage"
    return PartitionError(
        f"{type(model).__name__} cannot be cut into {n} stages, but into {would_do}: its forward "
        f"calls {counted(len(layers), 'layer')} ({_listed(layers)}){why}"
    )


def _listed(cuts: Sequence[Cut]) -> str:
    few = [repr(cut) for cut in cuts]
    return ", ".join(few if len(few) < 6 else [*few[:3], "…", few[-1]])


def _sums(values: Mapping[Cut, float], groups: Iterable[Sequence[Cut]]) -> list[float]:
    return [sum(map(values.__getitem__, group)) for group in groups]


def _grouped(calls: Sequence[Cut], starts: Sequence[Cut]) -> list[Sequence[Cut]]:
    """Calls in groups; all but the first group begin with one of ``starts``."""
    bounds = [0, *map(calls.index, starts), len(calls)]
    return [calls[start:end] for start, end in pairwise(bounds)]


def _text(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.3g}"
