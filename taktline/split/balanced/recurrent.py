"""What recurrent layers cost: torch's counter of operations knows nothing of them."""

from __future__ import annotations

from typing import Any

import torch

from taktline import pytree

__all__ = ["RECURRENT"]


def _operations(*args: Any, **_: Any) -> int:
    """Every weight is multiplied with each vector of the input, or of the state before."""
    inputs: torch.Tensor = args[0]
    weights = [part for part in pytree.tree_leaves(args[1:3]) if isinstance(part, torch.Tensor)]
    vectors = inputs.numel() // inputs.shape[-1]
    return sum(2 * vectors * weight.numel() for weight in weights if weight.ndim == 2)


_operations._get_raw = True  # pyright: ignore[reportFunctionMemberAccess]  # with tensors, not shapes

RECURRENT: dict[Any, Any] = {
    torch.ops.aten.mkldnn_rnn_layer: _operations,
    torch.ops.aten._cudnn_rnn: _operations,
}
"""Counters of operations, as ``FlopCounterMode`` takes them."""
