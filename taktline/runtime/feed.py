"""What a step works on: its call, its micro-batches, and losses, weighted and shared by ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from taktline import pytree
from taktline.checks import check, warn
from taktline.errors import BatchError, MismatchError
from taktline.runtime.microbatch import Batch, bounds
from taktline.text import counted
from taktline.transport import Channel, Handle, Transport
from taktline.transport.exchange import as_floats, as_integers

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


# Losses that ranks share, as part of a record.

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The types in which losses are shared."""
_NO_LOSS = -1


def losses_as_numbers(feed: Feed, relayed: torch.Tensor | None) -> tuple[int, ...]:
    """The losses and scales of this rank, which other ranks read with :func:`put_losses`.

    Main losses are left out if a :class:`LossRelay` has carried them, but not their type.
    """
    code, count = _NO_LOSS, feed.microbatches
    if feed.losses:
        dtype = feed.losses[0].dtype  # float64 holds those of integer types
        code = _DTYPES.index(dtype if dtype in _DTYPES else torch.float64)
    main = _values({} if relayed is not None else feed.losses, count)
    values = [*main, *_values(feed.aux_losses, count), *(feed.scales or [0.0] * count)]
    return code, int(bool(feed.aux_losses)), *as_integers(values)


def put_losses(ranks: Iterable[Sequence[int]], feed: Feed, relayed: torch.Tensor | None) -> None:
    """Put all ranks' losses into the feed: main ones with their scales, sums of added ones."""
    dtype, losses, aux = None, {}, {}
    for code, has_aux, *bits in ranks:
        values = as_floats(bits)
        count = len(values) // 3
        if code != _NO_LOSS:
            dtype, losses = _DTYPES[code], dict(enumerate(values[:count]))
            feed.scales = values[2 * count :] if any(values[2 * count :]) else None
        if has_aux:
            added = enumerate(values[count : 2 * count])
            aux = {m: aux.get(m, 0.0) + value for m, value in added}
    feed.losses, feed.aux_losses = _tensors(losses, dtype), _tensors(aux, dtype)
    if relayed is not None and losses:
        feed.losses = dict(enumerate(relayed.to(dtype).unbind()))


def _values(losses: Mapping[int, torch.Tensor], count: int) -> list[float]:
    """Losses as numbers with all their digits, 0 where there are none."""
    if not losses:
        return [0.0] * count
    return _joined(losses, count, next(iter(losses.values())).device).tolist()


def _joined(losses: Mapping[int, torch.Tensor], count: int, device: torch.device) -> torch.Tensor:
    """All losses together, so that the host waits for a GPU only once."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([losses[m].to(zero) if m in losses else zero for m in range(count)])


def _tensors(values: dict[int, float], dtype: torch.dtype | None) -> dict[int, torch.Tensor]:
    together = torch.tensor(list(values.values()), dtype=dtype, device="cpu")
    return dict(zip(values, together.unbind(), strict=True))


class LossRelay:
    """Sends losses from rank to rank as tensors, so that no host waits for the GPU.

    Losses take the way of the gradients, and reach a rank at its last stage::

        stage        0         1         2         3
        rank         0         1         2         0
        losses                 1 ◀────── 2 ◀────── 0
    """

    def __init__(self, transport: Transport, rank_of: Sequence[int], device: torch.device) -> None:
        """``rank_of`` has the rank of each stage."""
        self._transport = transport
        self._device = device
        last_stages = {rank: stage for stage, rank in enumerate(rank_of)}
        del last_stages[rank_of[-1]]
        sources = {rank: rank_of[stage + 1] for rank, stage in last_stages.items()}
        self._source = sources.get(transport.rank)
        self._targets = [rank for rank, source in sources.items() if source == transport.rank]
        self._sent: list[Handle] = []

    def share(self, losses: Mapping[int, torch.Tensor], count: int) -> torch.Tensor:
        """The losses of ``count`` micro-batches, the same on every rank; all ranks take part.

        A rank that should have losses and has none sends zeros.
        """
        here, values = self._transport.rank, _joined(losses, count, self._device)
        data = values.view(torch.uint8)
        if self._source is not None:
            self._transport.receiver(Channel(self._source, here, True))(data).wait()
        self._sent = [
            self._transport.sender(Channel(here, target, True))(data) for target in self._targets
        ]
        return values

    def settle(self) -> None:
        """Wait for the sends, after all ranks have posted their receives."""
        for handle in self._sent:
            handle.wait()
        self._sent = []
