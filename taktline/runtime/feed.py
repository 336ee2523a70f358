"""What a step works on: its call, its micro-batches with the weights of losses, its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from taktline import pytree
from taktline.checks import check, warn
from taktline.errors import BatchError, MismatchError
from taktline.runtime.microbatch import Batch, bounds
from taktline.text import counted

LossWeights: TypeAlias = Sequence[float] | torch.Tensor | Callable[[Any], float | torch.Tensor]
"""One number a micro-batch, or a function that returns it for a micro-batch's target."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of step() or eval()."""

    batch: Batch = field(default_factory=Batch)
    number: int = 0  # of the training step, for seeds
    trains: bool = False
    outputs: bool = True
    losses: list[torch.Tensor] | None = None  # to fill
    aux_losses: list[torch.Tensor] | None = None
    share_losses: bool = False  # whether every rank gets the losses
    loss_keywords: Mapping[str, Any] = field(default_factory=dict)
    loss_weights: LossWeights | None = None
    scale_grads: bool = True
    grad_scale: float = 1.0  # for every gradient, so that none underflows in half precision
    finalizes: bool = True  # whether gradients of sharded stages are reduced

    def __str__(self) -> str:
        if not self.trains:
            return "eval()"
        return "step()" if self.finalizes else "step(finalize_gradients=False)"

    @property
    def wants_losses(self) -> bool:
        """Whether this rank keeps the losses that it computes."""
        return self.share_losses or self.losses is not None

    def check(self) -> None:
        """Raise if the arguments are of the wrong type."""
        for name, wanted in (("losses", self.losses), ("aux_losses", self.aux_losses)):
            if wanted is not None and not isinstance(wanted, list):
                raise BatchError(f"{name} must be a list to fill, not {type(wanted).__name__}")
        check("share_losses", self.share_losses, bool, error=BatchError)
        check("return_outputs", self.outputs, bool, error=BatchError)
        check("finalize_gradients", self.finalizes, bool, error=BatchError)
        if self.trains and not torch.is_grad_enabled():
            raise MismatchError("step() trains, but under torch.no_grad() it cannot; call eval()")


@dataclass(slots=True)
class Feed:
    """The micro-batches of a step on one rank, and their results."""

    call: Call = Call()
    rows: int = 0
    """The rows of the batch, agreed on by all ranks; 0 if unknown."""
    microbatches: int = 0
    arguments: Sequence[Sequence[Any]] = ()
    keywords: Sequence[Mapping[str, Any]] = ()
    targets: Sequence[Any] | None = None
    scale: float = 1.0
    """The weight of every micro-batch's loss in the gradient."""
    scales: Sequence[float] | None = None
    """The weight of each loss of the loss function, where they differ."""
    row_scales: Sequence[float] | None = None
    """The weight of each loss that stages add, where micro-batches differ in size."""
    counts: torch.Tensor | None = None
    """The product of these and ``grad_scale`` for each micro-batch, in a buffer on the device: for
    the loss, and for losses that stages add. Only in a captured step, which is replayed."""
    outputs: dict[int, Any] | None = None
    """Outputs of the last stage; None if the caller does not want them."""
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    aux_losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """The sum of the losses that this rank's stages add, for each micro-batch."""
    observed: list[list[tuple[Any, Any]]] = field(default_factory=list)
    """Statistics from the modules of each forward, applied at the end of the step."""

    def clear(self) -> None:
        """Reset every field."""
        self.__init__()


def listed(found: Mapping[int, torch.Tensor], count: int) -> list[torch.Tensor]:
    """Losses by micro-batch; zero for one without a loss."""
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
    # Losses without weight are left out: they may be nan. Each is multiplied by itself, as a tensor
    # of weights would wait for the GPU.
    parts = [losses[m].double() * count for m, count in enumerate(counts) if count]
    dtype = losses[0].dtype
    mean = torch.stack(parts).sum() / sum(counts)
    return mean.to(dtype if dtype.is_floating_point else torch.float64)


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
    tensors = [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, torch.Tensor)]
    return tensors[0].shape[0] if tensors and tensors[0].ndim else 0


def scales(weights: LossWeights, targets: Sequence[Any], *, normalised: bool) -> list[float]:
    """The weight of each micro-batch's loss in the gradient.

    >>> scales([3, 1], [None, None], normalised=True)
    [0.75, 0.25]
    >>> scales(torch.Tensor.sum, [torch.ones(2), torch.ones(1)], normalised=False)
    [2.0, 1.0]
    """
    found = [weights(target) for target in targets] if callable(weights) else list(weights)
    if len(found) != len(targets):
        raise BatchError(
            f"loss_weights has {counted(len(found), 'number')}, but there are "
            f"{counted(len(targets), 'micro-batch')}; pass one for each, or a function of a "
            "micro-batch's target: a batch with fewer rows has fewer"
        )
    # Together, to wait for a GPU only once.
    numbers = torch.stack([torch.as_tensor(number).double() for number in found]).tolist()
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise BatchError(f"loss_weights must be numbers from 0 up, not {numbers}")
    total = sum(numbers)
    if normalised and total == 0:
        raise BatchError("loss_weights are all 0, so no micro-batch counts; leave out such a batch")
    return [number / total for number in numbers] if normalised else numbers
