"""Batch norm whose running statistics are those of the batch, not of its micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from taktline.side_values import side_values, uncompiled

Statistics: TypeAlias = tuple[int, torch.Tensor, torch.Tensor]
"""Of one forward: how many values each channel has, their mean, and the sum of squared distances
from the mean."""


def _statistics(values: torch.Tensor) -> Statistics:
    """The statistics of values with the channels in dimension 1."""
    values = values.detach()
    wide = values if values.dtype == torch.float64 else values.float()
    others = [dim for dim in range(values.ndim) if dim != 1]
    variance, mean = torch.var_mean(wide, others, correction=0)
    count = values.numel() // values.shape[1]
    return count, mean, variance * count


class DeferredBatchNorm(nn.BatchNorm1d):
    """Batch norm that updates its running statistics once per step, with those of the whole batch.

    In a pipeline, a plain batch norm updates them once per micro-batch. Both normalise each
    micro-batch by itself. Outside of a pipeline this is a plain batch norm. Blocks that
    checkpointing runs a second time do not count twice, and failed steps do not count.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> type(DeferredBatchNorm.convert(model)[1]).__name__
    'DeferredBatchNorm'
    """

    @classmethod
    def convert(cls, module: nn.Module) -> nn.Module:
        """The module, in which each ``nn.BatchNorm1d``, ``2d`` and ``3d`` has become such a one.

        Parameters, buffers, hooks and all names stay.
        """
        for part in module.modules():
            if type(part) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
                part.__class__ = cls
        return module

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, not {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise the input; in training, record its statistics."""
        if not (self.training and self.track_running_stats):
            return super().forward(input)
        self._check_input_dim(input)
        output = F.batch_norm(
            input, None, None, self.weight, self.bias, training=True, eps=self.eps
        )
        _observe(self, input)
        return output

    @torch.no_grad()
    def update(self, parts: Sequence[Statistics]) -> None:
        """Update the running statistics with those of a batch, given in parts."""
        tracked, mean, var = self.num_batches_tracked, self.running_mean, self.running_var
        if mean is None or var is None:
            return
        if tracked is not None:
            tracked.add_(1)
        factor = self.momentum
        if factor is None:  # all batches count the same
            factor = 0.0 if tracked is None else 1 / float(tracked)
        total = sum(count for count, _, _ in parts)
        whole = torch.stack([own * (count / total) for count, own, _ in parts]).sum(0)
        squares = [square + count * (own - whole) ** 2 for count, own, square in parts]
        variance = torch.stack(squares).sum(0) / (total - 1)
        for running, found in ((mean, whole), (var, variance)):
            running.mul_(1 - factor).add_(found.to(running.dtype), alpha=factor)


@uncompiled
def _observe(norm: DeferredBatchNorm, input: torch.Tensor) -> None:
    side_values().observe(norm, _statistics(input))


def update_all(forwards: Iterable[Sequence[tuple[DeferredBatchNorm, Statistics]]]) -> None:
    """Update every batch norm with the statistics of the forwards of a step.

    A batch norm that a forward uses several times is updated as often.
    """
    found: dict[tuple[DeferredBatchNorm, int], list[Statistics]] = {}
    for observed in forwards:
        uses: Counter[DeferredBatchNorm] = Counter()
        for norm, statistics in observed:
            found.setdefault((norm, uses[norm]), []).append(statistics)
            uses[norm] += 1
    for (norm, _), parts in found.items():
        norm.update(parts)
