"""The norm of all gradients, over every rank, stage and shard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from taktline.sharding import is_sharded
from taktline.train.ranks import Ranks

__all__ = ["clip", "norm_of"]


def norm_of(
    parameters: Iterable[nn.Parameter], ranks: Ranks, norm_type: float, *, device: torch.device
) -> torch.Tensor:
    """The norm of the gradients of all processes, of which each gives its own parameters."""
    parts = [
        _whole(torch.nn.utils.get_total_norm([_gradient(p) for p in alike], norm_type))
        for alike in _alike(parameters)
    ]
    if math.isinf(norm_type):
        total = ranks.highest(max(parts, default=0.0), "grad_norm()")
    else:
        total = ranks.add_up(sum(part**norm_type for part in parts), "grad_norm()")
        total **= 1.0 / norm_type
    return torch.tensor(total, dtype=torch.float32, device=device)


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Scale gradients down to what makes the norm of all of them the largest that is allowed."""
    for alike in _alike(parameters):
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, norm)


def _alike(parameters: Iterable[nn.Parameter]) -> Sequence[list[nn.Parameter]]:
    """Parameters with gradients, those of one mesh and one layout together."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            layout = (gradient.device_mesh, gradient.placements) if is_sharded(gradient) else None
            groups.setdefault(layout, []).append(parameter)
    return list(groups.values())


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None  # see _alike
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _whole(norm: torch.Tensor) -> float:
    return float(norm.full_tensor() if is_sharded(norm) else norm)
