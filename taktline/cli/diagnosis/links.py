"""How well each pair of ranks can talk, measured over the channels that a pipeline uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from itertools import combinations
from statistics import median
from time import perf_counter

import torch

from taktline.cli.diagnosis.report import Finding, MeasuredLink, Verdict, of_ranks
from taktline.transport import Channel, Transport
from taktline.transport.exchange import share_values

__all__ = ["judge", "measure", "pairs"]

ALL_PAIRS = 8
"""Up to so many ranks, every pair is measured; beyond, neighbours."""
ROUND_TRIPS = 25
SIZES = (256 << 10, 4 << 20, 4 << 20, 4 << 20)
"""Bytes of the large messages, one after the other."""
_FILLING = 7
"""Each byte of them."""
SECONDS = 0.5
"""Once a direction has taken so long, no further large message is begun."""


def pairs(ranks: int) -> list[tuple[int, int]]:
    """The pairs to measure: all, or each rank and the next one around the ring.

    >>> pairs(3)
    [(0, 1), (0, 2), (1, 2)]
    >>> pairs(9)[-2:]
    [(7, 8), (0, 8)]
    """
    if ranks <= ALL_PAIRS:
        return list(combinations(range(ranks), 2))
    return [*((rank, rank + 1) for rank in range(ranks - 1)), (0, ranks - 1)]


def measure(transport: Transport, device: torch.device) -> list[MeasuredLink]:
    """The links of all pairs, in both directions; every rank takes part and gets all of them."""
    channels = [
        Channel(*ends, gradients=False)
        for pair in pairs(transport.size)
        for ends in (pair, pair[::-1])
    ]
    transport.open(channels)
    mine: list[MeasuredLink] = []
    for channel in channels:
        if transport.rank in (channel.sender, channel.receiver):
            end = _End(transport, channel, device)
            mine += [end.measure()] if transport.rank == channel.sender else end.answer()
        # One pair at a time: others would take their part of the bandwidth.
        transport.exchange([0])
    values, shape = [astuple(link) for link in mine], [(int, int, float, float, bool)]
    told = share_values(transport, values, shape, "an exchange of links", what="the links")
    return [MeasuredLink(*each) for links in told for each in links]


def judge(links: list[MeasuredLink]) -> Iterator[Finding]:
    """Whether everything arrived, and whether a link is much worse than the others."""
    typical = median([link.bandwidth for link in links] or [0.0])
    broken = [link for link in links if not link.intact]
    slow = [link for link in links if link.bandwidth < typical / 4]
    told = ", ".join(f"{link.sender} → {link.receiver}" for link in broken or slow)
    if broken:
        text = f"something else arrived than what was sent: {told}"
        advice = "check the network, and that every rank runs the same torch"
        yield Finding("links", Verdict.FAILED, text, advice)
    elif slow:
        text = f"less than a quarter of the usual bandwidth: {told}"
        advice = "place neighbouring stages on ranks with fast links"
        yield Finding("links", Verdict.WARNING, text, advice)
    elif links:
        ranks = sorted({link.sender for link in links})
        peers = "each other" if len(ranks) <= ALL_PAIRS else "their neighbours"
        yield Finding("links", Verdict.OK, f"{of_ranks(ranks)} can talk to {peers}, both ways")
    else:
        yield Finding("links", Verdict.OK, "one rank alone has nobody to talk to")


class _End:
    """One end of a channel and of the one back.

    The sender says how large the next message is, sends it, and waits for the answer; the receiver
    answers until it is told that it was the last one.
    """

    def __init__(self, transport: Transport, channel: Channel, device: torch.device) -> None:
        self._there = channel
        self._back = Channel(channel.receiver, channel.sender, channel.gradients)
        self._transport = transport
        self._device = device
        # Made once: getting fresh memory takes as long as a quick link takes to fill it.
        self._buffers: dict[int, torch.Tensor] = {}

    def measure(self) -> MeasuredLink:
        """As the sender: how the link is."""
        intact = self._ask(0)  # Connects, and tells whether they can talk at all.
        trips: list[float] = []
        for _ in range(ROUND_TRIPS):
            begin = perf_counter()
            intact &= self._ask(0)
            trips.append(perf_counter() - begin)
        latency = median(trips) / 2
        rates: list[float] = []
        begin_all = perf_counter()
        for size in SIZES:
            self._buffer(size).fill_(_FILLING)
            begin = perf_counter()
            intact &= self._ask(size)
            # Two small messages frame the large one: theirs is not the large one's time.
            seconds = perf_counter() - begin - 2 * latency
            rates.append(size / max(seconds, 1e-9))
            if perf_counter() - begin_all > SECONDS:
                break
        self._tell(self._there, -1, 0)
        # The first one is short and warms up.
        rate = median(rates[1:] or rates)
        return MeasuredLink(self._there.sender, self._there.receiver, latency, rate, intact)

    def answer(self) -> list[MeasuredLink]:
        """As the receiver: nothing of its own, once all is answered."""
        while True:
            size, mark = self._heard(self._there)
            if size < 0:
                return []
            if size:
                body = self.receive(self._there, size)
                # A few bytes stand for all: to look at each would be part of the time.
                mark = mark if body[:: size // 8].tolist() == [_FILLING] * 8 else -1
            self._tell(self._back, size, mark)

    def receive(self, channel: Channel, nbytes: int) -> torch.Tensor:
        """Receive, and wait until it is there."""
        buffer = self._buffer(nbytes)
        self._transport.receiver(channel)(buffer).wait()
        return buffer

    def _ask(self, size: int) -> bool:
        mark = 1000 * self._there.sender + self._there.receiver
        self._tell(self._there, size, mark)
        if size:
            self._transport.sender(self._there)(self._buffer(size)).wait()
        return self._heard(self._back) == (size, mark)

    def _tell(self, channel: Channel, *numbers: int) -> None:
        message = torch.tensor(numbers, dtype=torch.int64, device=self._device).view(torch.uint8)
        self._transport.sender(channel)(message).wait()

    def _heard(self, channel: Channel) -> tuple[int, int]:
        """Two numbers. Reading them waits for a GPU, too, so that times are right."""
        size, mark = self.receive(channel, 16).view(torch.int64).tolist()
        return size, mark

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """The buffer for messages of a size."""
        if nbytes not in self._buffers:
            self._buffers[nbytes] = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        return self._buffers[nbytes]
