"""What the layers of a model cost: counted without data, or measured."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from taktline import pytree
from taktline.split.balanced.recurrent import RECURRENT
from taktline.split.named.course import Cut
from taktline.split.named.layout import Layout
from taktline.split.named.walk import walk
from taktline.split.traced.trace import in_mode

__all__ = ["Effort", "count", "measure"]

_RUNS = 3


class Effort(NamedTuple):
    """What a walk through the forward of a model has counted."""

    operations: dict[Cut, int]
    """The floating-point operations in each call of a unit, in the order of the calls."""
    runs: Counter[str]
    """How often each module has run, also those inside of units; some units run several times."""


def count(layout: Layout, call: Any) -> Effort:
    """Count the operations of all units, without data.

    What multiplies no matrices counts with one operation for each number that it returns.
    """
    runs: Counter[str] = Counter()
    units = {name: probe.module for name, probe in layout.probes.items()}
    every = dict(nn.Module.named_modules(layout.empty_model))
    with (
        _Operations() as counted,
        _watched(units, counted.begin, counted.end),
        _watched(every, lambda cut: runs.update([cut.unit])),
    ):
        course = walk(layout, *call, anew=True)
    return Effort({cut: counted.counts.get(cut, 0) for cut in course.cuts()}, runs)


def measure(model: nn.Module, units: Iterable[str], call: Any) -> dict[Cut, float]:
    """The time that each call of a unit takes in evaluation, in milliseconds.

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
            with _watched(named, begin, end):
                model(*args, **kwargs)
            if run:
                best = {cut: min(took, best.get(cut, took)) for cut, took in times.items()}
    return best


class _Operations(TorchDispatchMode):
    """Counts for the unit that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[Cut, int] = {}
        self._now: Cut | None = None

    def begin(self, cut: Cut) -> None:
        """A unit runs."""
        self._now = cut

    def end(self, cut: Cut) -> None:
        """It has run."""
        self._now = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._now:
            packet = func.overloadpacket
            known = flop_registry.get(packet) or RECURRENT.get(packet)
            self.counts[self._now] = self.counts.get(self._now, 0) + (
                known(*args, **kwargs, out_val=result) if known else _size(func, result)
            )
        return result


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _size(func: Any, result: Any) -> int:
    """How many numbers an operation returns; none if it returns a view."""
    if any(made.alias_info is not None for made in func._schema.returns):
        return 0
    return sum(
        leaf.numel() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)
    )


@contextmanager
def _watched(
    units: Mapping[str, nn.Module],
    begin: Callable[[Cut], None],
    end: Callable[[Cut], None] = lambda cut: None,
) -> Iterator[None]:
    """Call something around each call of some modules."""
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
