"""What the layers of a model cost: counted operations, also of runs without data."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from torch.utils.flop_counter import flop_registry

from taktline.private import private
from taktline.split.steps import all_tensors

_PRODUCT = re.compile(r"(^|_)(mm|bmm|gmm|mv|dot|linear|matmul)(_|$)")
"""Operations that multiply matrices, of torch and of other libraries: ``_scaled_grouped_mm_v2``."""
_GATHERS = {"embedding", "index", "index_select", "gather", "index_put_", "index_add_"}
"""Operations that read only some rows of a tensor."""
_RECURRENT = {"mkldnn_rnn_layer", "_cudnn_rnn"}
_VIEWS = {"_unsafe_view"}
"""Views, which their schemas do not say."""
_NUMBER = 16
"""A number that is read or written takes as long as so many operations of a product."""
_CALL = 100_000
"""The same of a call, forward and backward, as small as it may be."""
_OF_ACTIVATIONS = re.compile(r"bmm|attention")
"""Products without a weight."""

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
        self.backward_input = 0
        """The cost of the operations that the backward passes through."""
        self._products = self._trained = 0
        """The flops of products with weights, and of those whose weights get gradients."""

    @property
    def cost(self) -> int:
        """How long it takes, in the time of one floating-point operation of a product."""
        return self.flops + _NUMBER * self.numbers + _CALL * self.calls

    @property
    def backward_weight(self) -> int:
        """The cost of the gradients of weights: nothing where all of them are frozen."""
        products = self._products or 1
        return self.backward_input * (self._trained if self._products else 1) // products

    @property
    def training(self) -> int:
        """The cost of a forward with its backward, over 3: ``cost`` where all weights train."""
        return (self.cost + self.backward_input + self.backward_weight) // 3

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = getattr(func, "_schema", None)
        made = [] if schema is None else [each.alias_info for each in schema.returns]
        name = getattr(func, "__name__", "").partition(".")[0]
        is_view = any(alias is not None and not alias.is_write for alias in made)
        is_view = is_view or name in _VIEWS
        if all_tensors(result) and not is_view:  # it computes, and does not only ask
            before = self.cost
            self.calls += 1
            self.flops += (flops := _flops(func, args, kwargs, result))
            written, given = _size(result), all_tensors((args, kwargs))
            self.numbers += written + (written if name in _GATHERS else _size((args, kwargs)))
            if any(tensor.requires_grad for tensor in given):
                self.backward_input += self.cost - before
                if flops and not _OF_ACTIVATIONS.search(name):
                    # A quantised weight is a tensor without a gradient here, too.
                    weight = [tensor for tensor in given if tensor.ndim > 1][-1:]
                    self._products += flops
                    self._trained += flops * any(tensor.requires_grad for tensor in weight)
        return result


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The floating-point operations of a product; 0 of others."""
    packet = getattr(func, "overloadpacket", func)
    if packet in flop_registry:
        with suppress(AssertionError):  # it does not know grouped queries
            return flop_registry[packet](*args, **kwargs, out_val=result)
    name = getattr(packet, "__name__", "")
    given = all_tensors((args, kwargs))
    if name in _RECURRENT:
        # Each vector of the input, or of the state, is multiplied with every matrix of weights.
        vectors = given[0].numel() // given[0].shape[-1]
        return sum(2 * vectors * weight.numel() for weight in given[1:5] if weight.ndim == 2)
    if "dot_product" in name and len(given) > 2:
        query, key, value = given[:3]
        pairs = query.numel() // query.shape[-1] * key.shape[-2]
        return 2 * pairs * (query.shape[-1] + value.shape[-1])
    is_product = _PRODUCT.search(name) and len(given) > 1 and given[0].ndim
    return 2 * _size(result) * given[0].shape[-1] if is_product else 0


def _size(tree: Any) -> int:
    return sum(tensor.numel() for tensor in all_tensors(tree))
