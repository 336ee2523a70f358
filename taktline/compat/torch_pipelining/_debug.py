"""Arguments as short texts."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import map_aggregate

__all__ = ["friendly_debug_info", "map_debug_info"]


def friendly_debug_info(v: Any) -> str:
    """A tensor by its shape and type, anything else as it prints.

    >>> friendly_debug_info(torch.zeros(2))
    'Tensor(torch.Size([2]), grad=False, dtype=torch.float32)'
    """
    if isinstance(v, torch.Tensor):
        return f"Tensor({v.shape}, grad={v.requires_grad}, dtype={v.dtype})"
    return str(v)


def map_debug_info(a: Any) -> Any:
    """The same for each leaf of a nesting.

    >>> map_debug_info({"a": (1, None)})
    {'a': ('1', 'None')}
    """
    return map_aggregate(a, friendly_debug_info)
