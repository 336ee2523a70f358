"""The costs of what runs, counted without data: products, numbers read and written, calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from taktline.private import private
from taktline.split.arguments import Call, tensors_in
from taktline.split.named.dry_run import dry_run
from taktline.split.named.forward_summary import Cut
from taktline.split.named.layout import Layout

_RECURRENT = {"mkldnn_rnn_layer", "_cudnn_rnn"}
_PRODUCT = re.compile(r"(^|_)(mm|bmm|gmm|mv|dot|linear|matmul)(_|$)")
"""Operations that multiply matrices, of torch and of other libraries: ``_scaled_grouped_mm_v2``."""
_GATHERS = {"embedding", "index", "index_select", "gather", "index_put_", "index_add_"}
"""Operations that read only some rows of a tensor."""
_NUMBER = 16
"""A number that is read or written takes as long as so many operations of a product."""
_CALL = 100_000
"""The same of a call, forward and backward, as small as it may be."""

_Mode = private("torch.utils._python_dispatch.TorchDispatchMode", "counting operations")


class OperationCounter(_Mode):
    """Counts the operations that run inside of it.

    >>> with OperationCounter() as counter:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> counter.flops, counter.numbers, counter.calls
    (48, 44, 3)
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        """Floating-point operations of products of matrices, convolutions and attention."""
        self.numbers = 0
        """Numbers that operations read and write, without views."""
        self.calls = 0
        """Operations, without views."""

    @property
    def cost(self) -> int:
        """How long it takes, in the time of one floating-point operation of a product."""
        return self.flops + _NUMBER * self.numbers + _CALL * self.calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if tensors_in(result) and not _returns_view(func):  # it computes, and does not only ask
            self.calls += 1
            self.flops += _flops(func, args, kwargs, result)
            written = _size(result)
            is_whole = getattr(func, "__name__", "").partition(".")[0] not in _GATHERS
            self.numbers += written + (_size((args, kwargs)) if is_whole else written)
        return result


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The floating-point operations of a product; 0 of others."""
    packet = getattr(func, "overloadpacket", func)
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=result)
    name = getattr(packet, "__name__", "")
    if name in _RECURRENT:
        return _recurrent_flops(*args)
    given = tensors_in((args, kwargs))
    if "dot_product" in name and len(given) > 2:
        query, key, value = given[:3]
        pairs = query.numel() // query.shape[-1] * key.shape[-2]
        return 2 * pairs * (query.shape[-1] + value.shape[-1])
    if _PRODUCT.search(name) and len(given) > 1 and given[0].ndim:
        one, other, made = *given[:2], tensors_in(result)
        if one.ndim == other.ndim == 2 and made and made[0].ndim == 3:  # in groups of columns
            return 2 * one.numel() * other.shape[-1]
        return 2 * _size(result) * one.shape[-1]
    return 0


def _size(tree: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(tree))


def _recurrent_flops(inputs: torch.Tensor, *others: Any) -> int:
    """Each vector of the input, or of the state, is multiplied with every matrix of weights."""
    vectors = inputs.numel() // inputs.shape[-1]
    matrices = [weight for weight in tensors_in(others[:2]) if weight.ndim == 2]
    return sum(2 * vectors * weight.numel() for weight in matrices)


def _returns_view(func: Any) -> bool:
    """Whether an operation returns a part of its argument, and computes nothing."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    made = [each.alias_info for each in schema.returns]
    return any(alias is not None and not alias.is_write for alias in made)


class LayerCosts(NamedTuple):
    """What a dry run has counted."""

    operations: dict[Cut, int]
    """The cost of each call of a unit, in the order of the calls."""
    runs: Counter[str]
    """How often each module has run, also inside of units."""


def count_operations(layout: Layout, call: Call) -> LayerCosts:
    """Count what all units cost, without data."""
    counter = OperationCounter()
    every = dict(nn.Module.named_modules(layout.empty_model))
    with counter, _spent(every, lambda: counter.cost) as (counts, runs):
        summary = dry_run(layout, *call, reruns=True)
    return LayerCosts({cut: counts.get(cut, 0) for cut in summary.unit_calls()}, runs)


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
