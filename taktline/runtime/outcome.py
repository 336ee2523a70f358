"""The outcome of a step as the ranks exchange it at the end: failures, losses, requests to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from taktline.runtime.step_data import Feed
from taktline.transport import Channel, Handle, Transport
from taktline.transport.exchange import as_floats, as_integers

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The types in which losses are shared."""
_NO_LOSS = -1


class Outcome:
    """One rank's outcome of a step, as numbers."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.failed = bool(numbers[0])
        self.skips = bool(numbers[1])
        self.preempted = bool(numbers[2])

    @classmethod
    def of(
        cls,
        feed: Feed,
        *,
        failed: bool,
        skips: bool,
        shares: int,
        relayed: bool = False,
        preempted: bool = False,
    ) -> Outcome:
        """This rank's outcome; ``shares`` is the number of micro-batches whose losses it has.

        ``relayed`` leaves out the main losses, which a :class:`LossRelay` carries.
        """
        numbers = [int(failed), int(skips), int(preempted)]
        if shares:
            # A rank that has failed may lack some losses; no rank reads them then.
            losses = {} if failed else feed.losses
            aux = {} if failed else feed.aux_losses
            numbers += [_code(losses[0].dtype) if losses else _NO_LOSS, int(bool(aux))]
            main = _values({} if relayed else losses, shares)
            scales = (None if failed else feed.scales) or [0.0] * shares
            for values in (main, _values(aux, shares), scales):
                numbers += as_integers(values)
        return cls(numbers)

    @staticmethod
    def share(outcomes: Sequence[Outcome], feed: Feed, relayed: torch.Tensor | None = None) -> None:
        """Put all ranks' losses into the feed: main ones with their scales, sums of added ones."""
        dtype, losses, aux = None, {}, {}
        for outcome in outcomes:
            code, has_aux, *bits = outcome.numbers[3:]
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
