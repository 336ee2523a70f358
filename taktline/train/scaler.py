"""A GradScaler for all ranks: if one finds an infinite gradient, all skip the step."""

from __future__ import annotations

from typing import Any

import torch

from taktline.train.ranks import Ranks

__all__ = ["Scaler"]


class Scaler(torch.amp.GradScaler):
    """What :meth:`taktline.Pipeline.scaler` returns; used like any other.

    >>> Scaler(Ranks(1, device=torch.device("cpu")), init_scale=4.0).get_scale()
    4.0
    """

    def __init__(self, ranks: Ranks, **options: Any) -> None:
        super().__init__(ranks.device.type, **options)
        self._ranks = ranks

    # Where torch looks for infinite gradients, whatever the optimizer.
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
        # A rank without gradients has a say, too: it must not go on where the others do not.
        return {device: anywhere.to(device) for device in (*found, found_inf.device)}
