"""Losses: which ones a caller wants, and the weight of each micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from taktline import pytree
from taktline.checks import require_flag, warn
from taktline.errors import BatchError
from taktline.runtime.leaves import bounds
from taktline.runtime.step_data import Feed
from taktline.text import counted

LossWeights: TypeAlias = Sequence[float] | torch.Tensor | Callable[[Any], float | torch.Tensor]
"""One number a micro-batch, or a function that returns it for a micro-batch's target."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The results that the caller of a step wants."""

    losses: list[torch.Tensor] | None
    aux_losses: list[torch.Tensor] | None
    shares: bool
    outputs: bool

    @property
    def lists(self) -> bool:
        """Whether there are lists to fill."""
        return self.losses is not None or self.aux_losses is not None

    def check(self) -> None:
        """Raise if the arguments are of the wrong type."""
        for name, wanted in (("losses", self.losses), ("aux_losses", self.aux_losses)):
            if wanted is not None and not isinstance(wanted, list):
                raise BatchError(f"{name} must be a list to fill, not {type(wanted).__name__}")
        require_flag("share_losses", self.shares, BatchError)
        require_flag("return_outputs", self.outputs, BatchError)

    def fill(self, feed: Feed) -> None:
        """Fill the lists with the losses of a step."""
        if self.losses is not None and feed.losses:
            self.losses[:] = _listed(feed.losses, feed.microbatches)
        if self.aux_losses is not None and feed.aux_losses:
            self.aux_losses[:] = _listed(feed.aux_losses, feed.microbatches)


def _listed(found: Mapping[int, torch.Tensor], count: int) -> list[torch.Tensor]:
    """By micro-batch; zero for one without a loss."""
    zero = torch.zeros_like(next(iter(found.values())))
    return [found.get(m, zero) for m in range(count)]


def mean_of(
    losses: Mapping[int, torch.Tensor], scales: Sequence[float] | None = None
) -> torch.Tensor | None:
    """The weighted mean of the losses; None without losses.

    >>> losses = {0: torch.tensor(1.0), 1: torch.tensor(5.0)}
    >>> mean_of(losses), mean_of(losses, [0.75, 0.25])
    (tensor(3.), tensor(2.))
    """
    if not losses:
        return None
    counts = [1.0] * len(losses) if scales is None else scales
    # Losses without weight are left out: they may be nan.
    counted = {m: count for m, count in enumerate(counts) if count}
    if scales is None:
        parts = torch.stack([losses[m] for m in counted]).double()
    else:  # each by its number: a tensor of them would wait for the GPU
        parts = torch.stack([losses[m].double() * count for m, count in counted.items()])
    dtype = losses[0].dtype
    return (parts.sum() / sum(counts)).to(dtype if dtype.is_floating_point else torch.float64)


def by_rows(rows: int, microbatches: int) -> list[float] | None:
    """The weight of each micro-batch by its share of the rows; None if all are equal.

    >>> by_rows(5, 2), by_rows(6, 2)
    ([0.6, 0.4], None)
    """
    if rows % microbatches == 0:
        return None
    return [(end - begin) / rows for begin, end in pairwise(bounds(rows, microbatches))]


def warn_if_uneven(rows: int, targets: Sequence[Any]) -> bool:
    """Warn if micro-batches of equal weight differ in size; returns whether they do."""
    count = len(targets)
    if rows and rows % count == 0:
        return False
    if rows:
        sizes = [end - begin for begin, end in pairwise(bounds(rows, count))]
    else:  # the caller has cut the batch
        sizes = [_rows_of(target) for target in targets]
    if len(set(sizes)) == 1:
        return False
    shown = ", ".join(map(str, sizes[:8])) + (", …" if count > 8 else "")
    warn(
        f"micro-batches differ in size ({shown} rows), and each of them counts the same: the loss "
        f"and its gradients are not those of the whole batch. Use batches that {count} "
        "micro-batches divide, pass loss_weights=… to a schedule of Taktline, or use its Pipeline "
        "with whole batches, which counts rows"
    )
    return True


def _rows_of(target: Any) -> int:
    """The rows of the first tensor in a target, 0 if there is none."""
    if isinstance(target, torch.Tensor):
        return target.shape[0] if target.ndim else 0
    tensors = (leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, torch.Tensor))
    return next((_rows_of(tensor) for tensor in tensors), 0)


def scales(weights: LossWeights, targets: Sequence[Any], *, normalised: bool) -> list[float]:
    """The weight of each micro-batch's loss in the gradient.

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
        fewer = ", or a function of a micro-batch's target: a batch with fewer rows has fewer"
        raise BatchError(
            f"loss_weights has {counted(len(found), 'number')}, but there are "
            f"{counted(len(targets), 'micro-batch')}; pass one for "
            f"each{fewer if len(found) > len(targets) else ''}"
        )
    # Together, to wait for a GPU only once.
    numbers = torch.stack([torch.as_tensor(number).double() for number in found]).tolist()
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise BatchError(f"loss_weights must be numbers from 0 up, not {numbers}")
    total = sum(numbers)
    if normalised and total == 0:
        raise BatchError("loss_weights are all 0, so no micro-batch counts; leave out such a batch")
    return [number / total for number in numbers] if normalised else numbers
