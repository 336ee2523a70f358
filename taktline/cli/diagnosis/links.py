"""How well each pair of ranks can talk, measured over the channels that a pipeline uses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple
from itertools import combinations
from statistics import median
from time import perf_counter

import torch

from taktline.checks import read
from taktline.cli.diagnosis.report import Finding, MeasuredLink, Verdict, of_ranks
from taktline.transport import Channel, Transport
from taktline.transport.control import share_texts

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
        if transport.rank == channel.sender:
            mine.append(_Caller(transport, channel, device).measure())
        elif transport.rank == channel.receiver:
            _Callee(transport, channel, device).answer()
        # One pair at a time: others would take their part of the bandwidth.
        transport.exchange([0])
    told = share_texts(transport, json.dumps([astuple(link) for link in mine]))
    shape = [(int, int, float, float, bool)]
    return [
        MeasuredLink(*values)
        for text in told
        for values in read(text, shape, what="links of a rank")
    ]


def judge(links: list[MeasuredLink]) -> Iterator[Finding]:
    """Whether everything arrived, and whether a link is much worse than the others."""
    broken = [link for link in links if not link.intact]
    if broken:
        told = ", ".join(f"{link.sender} → {link.receiver}" for link in broken)
        yield Finding(
            "links",
            Verdict.FAILED,
            f"something else arrived than what was sent: {told}",
            "check the network, and that every rank runs the same torch",
        )
        return
    if not links:
        yield Finding("links", Verdict.OK, "one rank alone has nobody to talk to")
        return
    typical = median(link.bandwidth for link in links)
    slow = [link for link in links if link.bandwidth < typical / 4]
    if slow:
        told = ", ".join(f"{link.sender} → {link.receiver}" for link in slow)
        yield Finding(
            "links",
            Verdict.WARNING,
            f"less than a quarter of the usual bandwidth: {told}",
            "place neighbouring stages on ranks with fast links",
        )
        return
    ranks = sorted({link.sender for link in links})
    peers = "each other" if len(ranks) <= ALL_PAIRS else "their neighbours"
    yield Finding("links", Verdict.OK, f"{of_ranks(ranks)} can talk to {peers}, both ways")


class _End:
    """One end of a channel and of the one back."""

    def __init__(self, transport: Transport, channel: Channel, device: torch.device) -> None:
        self.there = channel
        self.back = Channel(channel.receiver, channel.sender, channel.gradients)
        self.transport = transport
        self.device = device
        # Made once: getting fresh memory takes as long as a quick link takes to fill it.
        self._buffers: dict[int, torch.Tensor] = {}

    def message(self, *numbers: int) -> torch.Tensor:
        """A few numbers as bytes."""
        return torch.tensor(numbers, dtype=torch.int64, device=self.device).view(torch.uint8)

    def send(self, channel: Channel, buffer: torch.Tensor) -> None:
        """Send, and wait until it is on its way."""
        self.transport.sender(channel)(buffer).wait()

    def receive(self, channel: Channel, nbytes: int) -> torch.Tensor:
        """Receive, and wait until it is there."""
        buffer = self.buffer(nbytes)
        self.transport.receiver(channel)(buffer).wait()
        return buffer

    def buffer(self, nbytes: int) -> torch.Tensor:
        """The buffer for messages of a size."""
        if nbytes not in self._buffers:
            self._buffers[nbytes] = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        return self._buffers[nbytes]

    def numbers(self, channel: Channel) -> tuple[int, int]:
        """Receive two numbers. Reading them waits for a GPU, too, so that times are right."""
        size, mark = self.receive(channel, 16).view(torch.int64).tolist()
        return size, mark


class _Caller(_End):
    """Begins: says how large the next message is, sends it, waits for the answer."""

    def measure(self) -> MeasuredLink:
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
            self.buffer(size).fill_(_FILLING)
            begin = perf_counter()
            intact &= self._ask(size)
            # Two small messages frame the large one: theirs is not the large one's time.
            seconds = perf_counter() - begin - 2 * latency
            rates.append(size / max(seconds, 1e-9))
            if perf_counter() - begin_all > SECONDS:
                break
        self.send(self.there, self.message(-1, 0))
        # The first one is short and warms up.
        rate = median(rates[1:] or rates)
        return MeasuredLink(self.there.sender, self.there.receiver, latency, rate, intact)

    def _ask(self, size: int) -> bool:
        mark = 1000 * self.there.sender + self.there.receiver
        self.send(self.there, self.message(size, mark))
        if size:
            self.send(self.there, self.buffer(size))
        return self.numbers(self.back) == (size, mark)


class _Callee(_End):
    """Answers until it is told that it was the last one."""

    def answer(self) -> None:
        while True:
            size, mark = self.numbers(self.there)
            if size < 0:
                return
            if size:
                body = self.receive(self.there, size)
                # A few bytes stand for all: to look at each would be part of the time.
                mark = mark if body[:: size // 8].tolist() == [_FILLING] * 8 else -1
            self.send(self.back, self.message(size, mark))
