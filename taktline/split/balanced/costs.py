"""The costs of what runs, counted without data: products, numbers read and written, calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from taktline.split.arguments import Call
from taktline.split.empty_model import EmptyModel
from taktline.split.operations import OperationCounter
from taktline.split.repeat import record_twice
from taktline.split.steps import Cut, Record


class LayerCosts(NamedTuple):
    """What a recorded forward has counted."""

    record: Record
    operations: dict[Cut, int]
    """The cost of each call of a unit, in the order of the calls."""
    runs: Counter[str]
    """How often each module has run, also inside of units."""


def count_operations(empty: EmptyModel, call: Call) -> LayerCosts:
    """Record a forward, and count what all units cost, without data."""
    counter = OperationCounter()
    every = dict(empty.model.named_modules())
    with _spent(every, int) as (_, runs):
        record, costs = record_twice(empty, call, counter)
    times = record.repeats
    counted = Counter({name: count // times for name, count in runs.items()})
    return LayerCosts(record, {cut: costs.get(cut, 0) for cut in record.unit_calls()}, counted)


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
