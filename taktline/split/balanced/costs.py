"""The costs of what runs: floating-point operations, also without data, and times of layers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.device import keep_generators
from taktline.errors import PartitionError
from taktline.split.arguments import Call
from taktline.split.empty_model import EmptyModel
from taktline.split.operations import OperationCounter
from taktline.split.repeat import record_twice
from taktline.split.steps import Cut, Record
from taktline.split.traced.trace import in_mode

_RUNS = 3


class LayerCosts(NamedTuple):
    """What a recorded forward has counted."""

    record: Record
    operations: dict[Cut, int]
    """The floating-point operations of each call of a unit, in the order of the calls."""
    runs: Counter[str]
    """How often each module has run, also inside of units."""


def count_operations(empty: EmptyModel, call: Call) -> LayerCosts:
    """Record a forward, and count the operations of all units, without data.

    An operation that multiplies no matrices counts as one for each number that it returns.
    """
    counter = OperationCounter()
    every = dict(empty.model.named_modules())
    with _spent(every, int) as (_, runs):
        record, costs = record_twice(empty, call, counter)
    times = record.repeats
    counted = Counter({name: count // times for name, count in runs.items()})
    return LayerCosts(record, {cut: costs.get(cut, 0) for cut in record.unit_calls()}, counted)


def measure_times(model: nn.Module, units: Iterable[str], call: Call) -> dict[Cut, float]:
    """The time of each call of a unit in evaluation, in milliseconds.

    The shortest of a few runs, after one to warm up.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise PartitionError(
            "a model on the meta device cannot run, so its layers cannot be measured; count their "
            "operations (measure=False), or materialise it first"
        )
    args, kwargs = call
    named = {name: model.get_submodule(name) for name in units}
    best: dict[Cut, float] = {}
    devices = {tensor.device for tensor in tensors}
    with in_mode(model, training=False), keep_generators(devices), torch.no_grad():
        for run in range(_RUNS + 1):
            with _spent(named, _now) as (times, _):
                model(*args, **kwargs)
            if run:
                best = {cut: min(took, best.get(cut, took)) for cut, took in times.items()}
    return best


def _now() -> float:
    """The time in milliseconds."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return 1e3 * time.perf_counter()


@contextmanager
def _spent(
    modules: Mapping[str, nn.Module], clock: Callable[[], Any]
) -> Iterator[tuple[dict[Cut, Any], Counter[str]]]:
    """How far a clock goes on in each call of some modules, and how often each has begun."""
    spent: dict[Cut, Any] = {}
    begun: Counter[str] = Counter()
    ended: Counter[str] = Counter()

    def begin(name: str) -> None:
        begun[name] += 1
        spent[Cut(name, ended[name])] = clock()

    def end(name: str) -> None:
        cut = Cut(name, ended[name])
        if cut in spent:  # not at the end of a call in which the module has called itself
            spent[cut] = clock() - spent[cut]
            ended[name] += 1

    handles: list[Any] = []
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: begin(name)))
        handles.append(module.register_forward_hook(lambda *_, name=name: end(name)))
    try:
        yield spent, begun
    finally:
        for handle in handles:
            handle.remove()
