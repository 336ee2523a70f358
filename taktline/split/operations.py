"""Counts the floating-point operations of what runs, also without data."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from taktline.split.arguments import tensors_in

_RECURRENT = (torch.ops.aten.mkldnn_rnn_layer, torch.ops.aten._cudnn_rnn)


class OperationCounter(TorchDispatchMode):
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
