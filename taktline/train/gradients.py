"""Gradients over every rank, stage and shard: their scale, their norm, and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from taktline.checks import refuse, require_flag, require_instance, require_number
from taktline.errors import LossError, MismatchError
from taktline.private import private
from taktline.sharding import is_sharded, local
from taktline.train.build import Built
from taktline.train.ranks import Ranks

_norms_on_gpu = private("torch._foreach_norm", "norms of many gradients at once", None)

_DOUBLE = -1
"""Stands beside the places of gradients: some of them are in double precision."""


class Scaler(torch.amp.GradScaler):
    """A GradScaler for all ranks: if one finds an infinite gradient, all skip the step.

    >>> Scaler(Ranks(1, device=torch.device("cpu")), init_scale=4.0).get_scale()
    4.0
    """

    def __init__(self, ranks: Ranks, **options: Any) -> None:
        super().__init__(ranks.device.type, **options)
        self._ranks = ranks

    # Here torch looks for infinite gradients, for every optimizer.
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        here = any(bool(flag) for flag in found.values())
        anywhere = torch.full_like(
            found_inf, float(self._ranks.on_any_rank(here, "a GradScaler's step"))
        )
        # Also on a rank without gradients: it must skip the step, too.
        return {device: anywhere.to(device) for device in (*found, found_inf.device)}


def scale(ranks: Ranks, scaler: torch.amp.GradScaler) -> float:
    """The factor by which a scaler multiplies the loss; raises if ranks could disagree on steps."""
    require_instance("scaler", scaler, torch.amp.GradScaler)
    if not isinstance(scaler, Scaler) and not ranks.in_one_process:
        raise MismatchError(
            "this scaler checks only the gradients of its own process, so that ranks may "
            "disagree on a step; create it with pipe.scaler(…), which takes the same options"
        )
    return float(scaler.scale(torch.ones((), device=ranks.device)))


def norm(built: Built, norm_type: float) -> torch.Tensor:
    """The norm of the gradients of all processes.

    The norms of single gradients are combined in the order of the model, as torch does for the
    plain model. Then not even the last bit depends on how the model was cut.
    """
    if not (isinstance(norm_type, float) and norm_type == math.inf):
        norm_type = require_number("norm_type", norm_type, least=0)
    if not norm_type:
        refuse("norm_type", "more than 0", norm_type)
    parameters, ranks, device = built.counted(), built.ranks, built.ranks.device
    place_of = {parameter: place for place, parameter in parameters.items()}
    norms: dict[int, torch.Tensor] = {}
    for alike in _alike(parameters.values()):
        places = [place_of[parameter] for parameter in alike]
        gradients = [_gradient(parameter) for parameter in alike]
        if is_sharded(gradients[0]):
            norms[places[0]] = _norm_of_shards(gradients, norm_type)
        else:
            norms |= zip(places, _single_norms(gradients, norm_type), strict=True)
    numbers = torch.stack([norm.to(device) for norm in norms.values()]).tolist() if norms else []
    mine = dict(zip(norms, numbers, strict=True))
    if any(norm.dtype == torch.float64 for norm in norms.values()):
        mine[_DOUBLE] = 1.0
    shared = ranks.gathered(mine, "grad_norm()")
    dtype = torch.float64 if shared.pop(_DOUBLE, 0.0) else torch.float32
    ordered = [shared[place] for place in sorted(shared)]
    # Torch refuses the largest of no gradients.
    in_order = torch.tensor(ordered or [0.0], dtype=dtype, device="cpu")
    return torch.linalg.vector_norm(in_order, norm_type).to(device)


def _norm_of_shards(gradients: Sequence[Any], norm_type: float) -> torch.Tensor:
    """The norm of gradients with the same mesh and placements, whose ranks all call this."""
    if norm_type != math.inf:
        total: Any = torch.nn.utils.get_total_norm(gradients, norm_type)
        return total.full_tensor()
    # Torch refuses the largest element of an empty shard, which a short parameter leaves.
    from torch.distributed.tensor import Replicate

    mesh, placements = gradients[0].device_mesh, gradients[0].placements
    whole = [Replicate() if each.is_partial() else each for each in placements]
    shards = [local(gradient.redistribute(placements=whole)) for gradient in gradients]
    largest = [torch.linalg.vector_norm(shard, math.inf) for shard in shards if shard.numel()]
    norm = torch.stack(largest).max() if largest else shards[0].new_zeros(())
    for dim in range(mesh.ndim):
        norms = [torch.empty_like(norm) for _ in range(mesh.size(dim))]
        dist.all_gather(norms, norm, mesh.get_group(dim))
        norm = torch.stack(norms).max()  # unlike a reduction, it keeps a nan
    return norm


def _single_norms(gradients: list[torch.Tensor], norm_type: float) -> Sequence[torch.Tensor]:
    """The norm of each gradient, by the same kernels as in torch's clip_grad_norm_."""
    if norm_type == math.inf:  # torch refuses the largest element of an empty tensor
        gradients = [each if each.numel() else each.new_zeros(1) for each in gradients]
    if gradients[0].is_cuda and _norms_on_gpu is not None:
        return _norms_on_gpu(gradients, norm_type)
    return [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients]


def require_clip(max_norm: float, error_if_nonfinite: bool) -> None:
    """Raise unless the arguments of ``clip_grad_norm_`` are valid."""
    if not (isinstance(max_norm, float) and max_norm == math.inf):
        require_number("max_norm", max_norm, least=0)
    require_flag("error_if_nonfinite", error_if_nonfinite)


def clip(
    parameters: Iterable[nn.Parameter], max_norm: float, norm: torch.Tensor, require_finite: bool
) -> None:
    """Scale gradients down, so that the norm of all of them is at most ``max_norm``."""
    if require_finite and not math.isfinite(norm):
        raise LossError(
            f"the norm of the gradients is {norm.item()}, so they cannot be clipped; leave out "
            "this step, or pass error_if_nonfinite=False"
        )
    for alike in _alike(parameters):
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, norm)


def _alike(parameters: Iterable[nn.Parameter]) -> Sequence[list[nn.Parameter]]:
    """Parameters with gradients, grouped by mesh and placements."""
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
