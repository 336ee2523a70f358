"""Measures the link of each pair of ranks, over the channels that a pipeline uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from itertools import permutations
from statistics import median
from time import perf_counter

import torch

from taktline.cli.doctor.report import Finding, MeasuredLink, of_ranks
from taktline.transport import Channel, Transport
from taktline.transport.exchange import share_values

_ALL_PAIRS = 8
"""Up to so many ranks, every pair is measured; beyond, neighbours."""
_ROUND_TRIPS = 25
_SMALL = 16
_LARGE = (256 << 10, 4 << 20, 4 << 20, 4 << 20)
"""Bytes of the messages: the small ones, and the large ones one after the other."""
_SECONDS = 0.5
"""Once a direction has taken so long, no further large message is sent."""


def pairs(ranks: int) -> list[tuple[int, int]]:
    """The links to measure, from and to: between all ranks, or between neighbours around a ring.

    >>> pairs(3)
    [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    >>> pairs(9)[:4]
    [(0, 8), (0, 1), (1, 0), (1, 2)]
    """
    if ranks <= _ALL_PAIRS:
        return list(permutations(range(ranks), 2))
    return [(rank, (rank + step) % ranks) for rank in range(ranks) for step in (-1, 1)]


def measure(transport: Transport, device: torch.device) -> list[MeasuredLink]:
    """The links of all pairs, in both directions; every rank takes part and returns all of them."""
    channels = [Channel(*pair, gradients=False) for pair in pairs(transport.size)]
    transport.open(channels)
    # Made once: getting fresh memory takes as long as a quick link takes to fill it.
    buffer = torch.zeros(max(_LARGE), dtype=torch.uint8, device=device)
    # One link at a time: others would take their part of the bandwidth.
    links = [_measure(transport, channel, buffer) for channel in channels]
    mine = [astuple(link) for link in links if link.sender == transport.rank]
    shape = [(int, int, float, float, bool)]
    told = share_values(transport, mine, shape, "an exchange of links", what="the links")
    return [MeasuredLink(*each) for links in told for each in links]


def judge(links: list[MeasuredLink]) -> Iterator[Finding]:
    """Whether every message arrived intact, and whether a link is much slower than the others."""
    typical = median([link.bandwidth for link in links] or [0.0])
    broken = [link for link in links if not link.intact]
    slow = [link for link in links if link.bandwidth < typical / 4]
    told = ", ".join(f"{link.sender} → {link.receiver}" for link in broken or slow)
    if broken:
        text = f"what arrived differs from what was sent: {told}"
        advice = "check the network, and that every rank runs the same torch"
        yield Finding("links", "failed", text, advice)
    elif slow:
        text = f"less than a quarter of the usual bandwidth: {told}"
        advice = "place neighbouring stages on ranks with fast links"
        yield Finding("links", "warning", text, advice)
    elif links:
        ranks = sorted({link.sender for link in links})
        peers = "each other" if len(ranks) <= _ALL_PAIRS else "their neighbours"
        yield Finding("links", "ok", f"{of_ranks(ranks)} can talk to {peers}, both ways")
    else:
        yield Finding("links", "ok", "one rank has no links")


def _measure(transport: Transport, channel: Channel, buffer: torch.Tensor) -> MeasuredLink:
    """Measure one link; the numbers mean something on its sender only."""
    small = [_round_trip(transport, channel, buffer[:_SMALL]) for _ in range(_ROUND_TRIPS + 1)]
    latency = median(seconds for seconds, _ in small[1:]) / 2  # the first message connects
    large: list[tuple[float, bool]] = []
    for size in _LARGE:
        large.append(_round_trip(transport, channel, buffer[:size]))
        spent = round(1e6 * sum(seconds for seconds, _ in large))
        if max(transport.exchange([spent], "measuring links"))[0] > 1e6 * _SECONDS:
            break
    sent = zip(_LARGE, (seconds for seconds, _ in large), strict=False)
    rates = [size / max(seconds - latency, 1e-9) for size, seconds in sent]  # without the answer
    rate = median(rates[1:] or rates)  # the first one warms up
    intact = all(good for _, good in small + large)
    return MeasuredLink(channel.sender, channel.receiver, latency, rate, intact)


def _round_trip(transport: Transport, channel: Channel, buffer: torch.Tensor) -> tuple[float, bool]:
    """Send a message, to which the receiver answers whether it is intact; and the time of both."""
    back = Channel(channel.receiver, channel.sender, channel.gradients)
    filling = channel.sender % 255 + 1
    answer = torch.zeros(1, dtype=torch.uint8, device=buffer.device)
    if transport.rank == channel.sender:
        buffer.fill_(filling)
        begin = perf_counter()
        transport.sender(channel)(buffer).wait()
        transport.receiver(back)(answer).wait()
        intact = answer.item() == 1  # which waits for a GPU
        return perf_counter() - begin, intact
    if transport.rank == channel.receiver:
        buffer.zero_()
        transport.receiver(channel)(buffer).wait()
        # A few bytes stand for all: to look at each would be part of the time.
        answer[0] = bool((buffer[:: len(buffer) // 8] == filling).all())
        transport.sender(back)(answer).wait()
    return 0.0, True
