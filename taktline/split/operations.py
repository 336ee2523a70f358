"""Counts what operations cost, also without data."""

from __future__ import annotations

import re
from typing import Any

from torch.utils.flop_counter import flop_registry

from taktline.private import private
from taktline.split.arguments import tensors_in

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

    >>> import torch
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
        schema = getattr(func, "_schema", None)
        made = [] if schema is None else [each.alias_info for each in schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in made)
        if tensors_in(result) and not is_view:  # it computes, and does not only ask
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
    given = tensors_in((args, kwargs))
    if name in _RECURRENT:
        # Each vector of the input, or of the state, is multiplied with every matrix of weights.
        vectors = given[0].numel() // given[0].shape[-1]
        matrices = [weight for weight in tensors_in(args[1:3]) if weight.ndim == 2]
        return sum(2 * vectors * weight.numel() for weight in matrices)
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
