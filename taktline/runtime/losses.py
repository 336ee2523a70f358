"""Losses: which ones a caller wants, the weight of each micro-batch, how ranks share them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch

from taktline import pytree
from taktline.checks import require_flag, warn
from taktline.errors import BatchError
from taktline.private import private
from taktline.runtime.microbatch import bounds
from taktline.runtime.step_data import Feed
from taktline.text import counted
from taktline.transport import Channel, Handle, Transport
from taktline.transport.exchange import as_floats, as_integers

LossWeights: TypeAlias = Sequence[float] | torch.Tensor | Callable[[Any], float | torch.Tensor]
"""One number a micro-batch, or a function that returns it for a micro-batch's target."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The types in which losses are shared."""
_NO_LOSS = -1

_without_torch_functions = private(
    "torch._C.DisableTorchFunctionSubclass", "a late loss", nullcontext
)


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


def losses_as_numbers(feed: Feed, *, failed: bool, relayed: bool) -> list[int]:
    """The losses and scales of this rank, which other ranks read with :func:`put_losses`.

    A rank that has failed may lack some losses; no rank reads them then. Where a
    :class:`LossRelay` carries the main losses, they are ``relayed``.
    """
    count, feed = feed.microbatches, Feed() if failed else feed
    main, aux = feed.losses, feed.aux_losses
    numbers = [_code(main[0].dtype) if main else _NO_LOSS, int(bool(aux))]
    scales = feed.scales or [0.0] * count
    for values in (_values({} if relayed else main, count), _values(aux, count), scales):
        numbers += as_integers(values)
    return numbers


def put_losses(
    ranks: Iterable[Sequence[int]], feed: Feed, relayed: torch.Tensor | None = None
) -> None:
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


def _code(dtype: torch.dtype) -> int:
    """The type in which losses of a type are shared; float64 holds those of integer types."""
    return _DTYPES.index(dtype if dtype in _DTYPES else torch.float64)


def _values(losses: dict[int, torch.Tensor], count: int) -> list[float]:
    """Losses as numbers with all their digits, 0 where there are none."""
    if not losses:
        return [0.0] * count
    if len(losses) < count:
        losses = dict.fromkeys(range(count), torch.zeros((), device="cpu")) | losses
    values = [losses[m] for m in range(count)]
    if len({(value.dtype, value.device) for value in values}) > 1:
        values = [value.to(values[0].device, torch.float64) for value in values]
    # Together, to wait for a GPU only once.
    return torch.stack(values).double().tolist()


def _tensors(values: dict[int, float], dtype: torch.dtype | None) -> dict[int, torch.Tensor]:
    if not values:
        return {}
    together = torch.tensor(list(values.values()), dtype=dtype, device="cpu")
    return dict(zip(values, together.unbind(), strict=True))


class RelayedLosses(NamedTuple):
    """Losses that a stream of their own is receiving."""

    values: torch.Tensor
    arrival: Any

    def read(self) -> torch.Tensor:
        """The losses; the current stream waits for them."""
        stream = torch.cuda.current_stream(self.values.device)
        stream.wait_event(self.arrival)
        self.values.record_stream(stream)
        return self.values


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
        self._stream: torch.cuda.Stream | None = None

    def share(self, losses: Mapping[int, torch.Tensor], count: int) -> torch.Tensor:
        """The losses of ``count`` micro-batches, the same on every rank; all ranks take part.

        A rank that should have losses and has none sends zeros.
        """
        here = self._transport.rank
        if self._source is not None:
            values = torch.empty(count, dtype=torch.float64, device=self._device)
            arrives = Channel(self._source, here, True)
            self._transport.receiver(arrives)(values.view(torch.uint8)).wait()
        elif losses:
            zero = torch.zeros((), dtype=torch.float64, device=self._device)
            found = [losses[m].to(zero) if m in losses else zero for m in range(count)]
            values = torch.stack(found)
        else:
            values = torch.zeros(count, dtype=torch.float64, device=self._device)
        data = values.view(torch.uint8)
        self._sent = [
            self._transport.sender(Channel(here, target, True))(data) for target in self._targets
        ]
        return values

    def share_aside(self, losses: Mapping[int, torch.Tensor], count: int) -> RelayedLosses:
        """The same on a stream of its own, so that the next step does not wait for the losses."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for loss in losses.values():
            loss.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            values = self.share(losses, count)
            self.settle()
            return RelayedLosses(values, self._stream.record_event())

    def settle(self) -> None:
        """Wait for the sends, after all ranks have posted their receives."""
        for handle in self._sent:
            handle.wait()
        self._sent = []


class LateLoss(torch.Tensor):
    """The loss of a step that other ranks may still compute; its first use waits for them.

    >>> loss = LateLoss.like(torch.zeros(()), lambda: torch.tensor(0.5))
    >>> float(loss), loss + 1
    (0.5, tensor(1.5000))
    """

    _plain: torch.Tensor
    _read: Callable[[], torch.Tensor | None] | None

    @classmethod
    def like(cls, known: torch.Tensor, read: Callable[[], torch.Tensor | None]) -> LateLoss:
        """A loss of the type and on the device of a known one."""
        plain = torch.empty_like(known)
        made = plain.as_subclass(cls)
        made._plain, made._read = plain, read
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with _without_torch_functions():
            given = pytree.tree_map_only(LateLoss, _value, (tuple(args), kwargs or {}))
            return func(*given[0], **given[1])

    # Not all of torch asks the former: torch.tensor(loss) does not.
    __torch_dispatch__ = __torch_function__


def _value(loss: LateLoss) -> torch.Tensor:
    """The loss as a plain tensor; waits until it is known."""
    if loss._read is not None:
        found, loss._read = loss._read(), None
        if found is not None:
            loss._plain.copy_(found)
    return loss._plain


def late_mean(late: Callable[[Feed], None]) -> torch.Tensor | None:
    """The mean of the losses of all ranks; waits for them."""
    feed = Feed()
    late(feed)
    return mean_of(feed.losses, feed.scales)
