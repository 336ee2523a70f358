"""The costs of a model's layers: counted without data, or timed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.split.arguments import Call
from taktline.split.costs import OperationCounter
from taktline.split.named.dry_run import dry_run
from taktline.split.named.forward_summary import Cut
from taktline.split.named.layout import Layout
from taktline.split.traced.trace import in_mode

__all__ = ["LayerCosts", "count_operations", "measure_times"]

_RUNS = 3


class LayerCosts(NamedTuple):
    """What a dry run has counted."""

    operations: dict[Cut, int]
    """The floating-point operations of each call of a unit, in the order of the calls."""
    runs: Counter[str]
    """How often each module has run, also inside of units."""


def count_operations(layout: Layout, call: Call) -> LayerCosts:
    """Count the operations of all units, without data.

    An operation that multiplies no matrices counts as one for each number that it returns.
    """
    counter = OperationCounter()
    counts: dict[Cut, int] = {}
    runs: Counter[str] = Counter()
    units = {name: probe.module for name, probe in layout.probes.items()}
    every = dict(nn.Module.named_modules(layout.empty_model))

    def begin(cut: Cut) -> None:
        counts[cut] = counter.flops + counter.elements

    def end(cut: Cut) -> None:
        counts[cut] = counter.flops + counter.elements - counts[cut]

    with (
        counter,
        _around_calls(units, begin, end),
        _around_calls(every, lambda cut: runs.update([cut.unit])),
    ):
        summary = dry_run(layout, *call, reruns=True)
    return LayerCosts({cut: counts.get(cut, 0) for cut in summary.unit_calls()}, runs)


def measure_times(model: nn.Module, units: Iterable[str], call: Call) -> dict[Cut, float]:
    """The time of each call of a unit in evaluation, in milliseconds.

    The shortest of a few runs, after one to warm up.
    """
    args, kwargs = call
    named = {name: model.get_submodule(name) for name in units}
    best: dict[Cut, float] = {}
    times: dict[Cut, float] = {}

    def begin(cut: Cut) -> None:
        times[cut] = _now()

    def end(cut: Cut) -> None:
        times[cut] = 1e3 * (_now() - times[cut])

    with in_mode(model, False), torch.random.fork_rng(devices=[]), torch.no_grad():
        for run in range(_RUNS + 1):
            with _around_calls(named, begin, end):
                model(*args, **kwargs)
            if run:
                best = {cut: min(took, best.get(cut, took)) for cut, took in times.items()}
    return best


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def _around_calls(
    units: Mapping[str, nn.Module],
    begin: Callable[[Cut], None],
    end: Callable[[Cut], None] = lambda cut: None,
) -> Iterator[None]:
    """Call functions before and after each call of some modules."""
    calls: Counter[str] = Counter()

    def before(name: str) -> None:
        begin(Cut(name, calls[name]))

    def after(name: str) -> None:
        end(Cut(name, calls[name]))
        calls[name] += 1

    handles: list[Any] = []
    for name, module in units.items():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: before(name)))
        handles.append(module.register_forward_hook(lambda *_, name=name: after(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
