"""The costs of what runs: floating-point operations, also without data, and times of layers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from taktline.device import keep_generators
from taktline.errors import PartitionError
from taktline.private import private
from taktline.split.arguments import Call, tensors_in
from taktline.split.named.dry_run import dry_run
from taktline.split.named.forward_summary import Cut
from taktline.split.named.layout import Layout
from taktline.split.traced.trace import in_mode

_RECURRENT = (
    torch.ops.aten.mkldnn_rnn_layer,
    private("torch.ops.aten._cudnn_rnn", "counting recurrent layers on a GPU", None),
)
_RUNS = 3

_Mode = private("torch.utils._python_dispatch.TorchDispatchMode", "counting operations")


class OperationCounter(_Mode):
    """Counts the operations that run inside of it.

    >>> with OperationCounter() as counter:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> counter.flops, counter.elements
    (48, 18)
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        """Floating-point operations of products of matrices, convolutions and the like."""
        self.elements = 0
        """Numbers that all other operations have returned, without views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = getattr(func, "overloadpacket", func)
        if packet in _RECURRENT:
            self.flops += _recurrent_flops(*args)
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=result)
        elif not _returns_view(func):
            self.elements += sum(tensor.numel() for tensor in tensors_in(result))
        return result


def _recurrent_flops(inputs: torch.Tensor, *others: Any) -> int:
    """Each vector of the input, or of the state, is multiplied with every matrix of weights."""
    vectors = inputs.numel() // inputs.shape[-1]
    matrices = [weight for weight in tensors_in(others[:2]) if weight.ndim == 2]
    return sum(2 * vectors * weight.numel() for weight in matrices)


def _returns_view(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or any(made.alias_info is not None for made in schema.returns)


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
    every = dict(nn.Module.named_modules(layout.empty_model))
    with counter, _spent(every, lambda: counter.flops + counter.elements) as (counts, runs):
        summary = dry_run(layout, *call, reruns=True)
    return LayerCosts({cut: counts.get(cut, 0) for cut in summary.unit_calls()}, runs)


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
