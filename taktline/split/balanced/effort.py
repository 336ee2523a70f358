"""What the layers of a model cost: counted without data, or measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from taktline.split.balanced.recurrent import RECURRENT
from taktline.split.named.skeleton import Skeleton
from taktline.split.named.walk import walk
from taktline.split.traced.trace import in_mode

__all__ = ["count", "measure"]

_RUNS = 3


def count(skeleton: Skeleton, call: Any) -> dict[str, int]:
    """The floating-point operations in the forward of each unit, in the order of their calls.

    What multiplies no matrices counts with one operation for each number that it gives.
    """
    with _Counter() as counter:
        remove = _hook(
            ((name, twin.module) for name, twin in skeleton.twins.items()),
            counter.begin,
            counter.end,
        )
        try:
            course = walk(skeleton, *call)
        finally:
            remove()
    return {name: counter.counts.get(name, 0) for name in course.calls}


def measure(model: nn.Module, units: Iterable[str], call: Any) -> dict[str, float]:
    """The time that the forward of each unit takes in evaluation, in milliseconds.

    The shortest of a few runs, after one to warm up.
    """
    args, kwargs = call
    best: dict[str, float] = {}
    with in_mode(model, False), torch.random.fork_rng(devices=[]), torch.no_grad():
        for run in range(_RUNS + 1):
            clock = _Clock()
            named = ((name, model.get_submodule(name)) for name in units)
            remove = _hook(named, clock.begin, clock.end)
            try:
                model(*args, **kwargs)
            finally:
                remove()
            if run:
                best = {name: min(t, best.get(name, t)) for name, t in clock.times.items()}
    return best


class _Counter(TorchDispatchMode):
    """Counts for the unit that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self._unit = ""

    def begin(self, name: str) -> None:
        """A unit runs."""
        self._unit = name

    def end(self, name: str) -> None:
        """It has run."""
        self._unit = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._unit:
            packet = func.overloadpacket
            known = flop_registry.get(packet) or RECURRENT.get(packet)
            self.counts[self._unit] = self.counts.get(self._unit, 0) + (
                known(*args, **kwargs, out_val=result) if known else _size(func, result)
            )
        return result


class _Clock:
    """Takes the time of each unit."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self._since = 0.0

    def begin(self, name: str) -> None:
        """A unit runs."""
        self._since = _now()

    def end(self, name: str) -> None:
        """It has run."""
        self.times[name] = self.times.get(name, 0.0) + 1e3 * (_now() - self._since)


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _size(func: Any, result: Any) -> int:
    """How many numbers an operation gives; none if it gives a view."""
    if any(made.alias_info is not None for made in func._schema.returns):
        return 0
    return sum(
        leaf.numel() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)
    )


def _hook(
    units: Iterable[tuple[str, nn.Module]],
    begin: Callable[[str], None],
    end: Callable[[str], None],
) -> Callable[[], None]:
    """Call something around each unit's forward; gives what ends that."""
    handles: list[Any] = []
    for name, module in units:
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: begin(name)))
        handles.append(module.register_forward_hook(lambda *_, name=name: end(name)))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove
