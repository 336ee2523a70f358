"""The norm of all gradients, over every rank, stage and shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from taktline.sharding import is_sharded
from taktline.train.ranks import Ranks

__all__ = ["clip", "norm_of"]


def norm_of(
    parameters: Mapping[int, nn.Parameter], ranks: Ranks, norm_type: float, *, device: torch.device
) -> torch.Tensor:
    """The norm of the gradients of all processes; each has its own parameters, by their places.

    The norms of single gradients are put together in the order of the model, as in the plain one:
    then not even the last bit depends on how it was cut. Optimizers make much of that.
    """
    place_of = {parameter: place for place, parameter in parameters.items()}
    norms: dict[int, torch.Tensor] = {}
    for alike in _alike(parameters.values()):
        places = [place_of[parameter] for parameter in alike]
        gradients = [_gradient(parameter) for parameter in alike]
        if is_sharded(gradients[0]):
            total: Any = torch.nn.utils.get_total_norm(gradients, norm_type)
            norms[places[0]] = total.full_tensor()
        else:
            norms |= zip(places, _single_norms(gradients, norm_type), strict=True)
    numbers = torch.stack([norm.to(device) for norm in norms.values()]).tolist() if norms else []
    shared = ranks.gathered(dict(zip(norms, numbers, strict=True)), "grad_norm()")
    ordered = [shared[place] for place in sorted(shared)]
    in_order = torch.tensor(ordered, dtype=torch.float32, device="cpu")
    return torch.linalg.vector_norm(in_order, norm_type).to(device)


def _single_norms(gradients: list[torch.Tensor], norm_type: float) -> Sequence[torch.Tensor]:
    """The norm of each gradient, by the kernels that torch takes for it."""
    if gradients[0].is_cuda:
        return torch._foreach_norm(gradients, norm_type)  # pyright: ignore[reportPrivateImportUsage]
    return [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients]


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
