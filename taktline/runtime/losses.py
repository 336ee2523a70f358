"""Losses: which of them a caller wants, and how much each micro-batch counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from taktline.checks import require_flag
from taktline.errors import BatchError
from taktline.plan.words import counted
from taktline.runtime.feed import Feed

__all__ = ["LossWeights", "Wanted", "mean_of", "scales"]

LossWeights: TypeAlias = Sequence[float] | torch.Tensor | Callable[[Any], float | torch.Tensor]
"""One number a micro-batch, or what gives it for a micro-batch's target."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a step shall give back."""

    losses: list[torch.Tensor] | None
    aux_losses: list[torch.Tensor] | None
    shares: bool
    outputs: bool

    def check(self) -> None:
        """Make sure that the lists can be filled."""
        for name, wanted in (("losses", self.losses), ("aux_losses", self.aux_losses)):
            if wanted is not None and not isinstance(wanted, list):
                raise BatchError(f"{name} is a list to be filled, not a {type(wanted).__name__}")

        require_flag("share_losses", self.shares, BatchError)
        require_flag("return_outputs", self.outputs, BatchError)

    def fill(self, feed: Feed, microbatches: int) -> None:
        """Fill the lists with what a step has found."""
        if self.losses is not None and feed.losses:
            self.losses[:] = _listed(feed.losses, microbatches)
        if self.aux_losses is not None and feed.aux_losses:
            self.aux_losses[:] = _listed(feed.aux_losses, microbatches)


def _listed(found: Mapping[int, torch.Tensor], count: int) -> list[torch.Tensor]:
    """By micro-batch; one in which nothing was added has zero."""
    zero = torch.zeros_like(next(iter(found.values())))
    return [found.get(m, zero) for m in range(count)]


def mean_of(
    losses: Mapping[int, torch.Tensor], scales: Sequence[float] | None = None
) -> torch.Tensor | None:
    """The mean of the losses, each as it counts; None where they are not known.

    >>> losses = {0: torch.tensor(1.0), 1: torch.tensor(5.0)}
    >>> mean_of(losses), mean_of(losses, [0.75, 0.25])
    (tensor(3.), tensor(2.))
    """
    if not losses:
        return None
    counts = [1.0] * len(losses) if scales is None else scales
    # What does not count is left out: its loss may well be nan.
    parts = [losses[m].double() * count for m, count in enumerate(counts) if count]
    return (torch.stack(parts).sum() / sum(counts)).to(losses[0].dtype)


def scales(weights: LossWeights, targets: Sequence[Any], *, normalised: bool) -> list[float]:
    """What the gradient of each micro-batch's loss counts.

    >>> scales(
    ...     lambda target: (target != 0).sum(),
    ...     [torch.tensor([1, 2, 0]), torch.tensor([3, 0, 0])],
    ...     normalised=False,
    ... )
    [2.0, 1.0]
    >>> scales([3, 1], [None, None], normalised=True)
    [0.75, 0.25]
    """
    found = [weights(target) for target in targets] if callable(weights) else list(weights)
    if len(found) != len(targets):
        raise BatchError(
            f"loss_weights has {counted(len(found), 'number')}, but there are "
            f"{counted(len(targets), 'micro-batch')}; give one for each"
        )
    # Together, so that a GPU is waited for once.
    numbers = torch.stack([torch.as_tensor(number).double() for number in found]).tolist()
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise BatchError(f"loss_weights must be numbers from 0 up, not {numbers}")
    total = sum(numbers)
    if normalised and total == 0:
        raise BatchError("loss_weights are all 0, so no micro-batch counts; leave out such a batch")
    return [number / total for number in numbers] if normalised else numbers
