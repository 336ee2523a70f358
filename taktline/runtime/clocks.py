"""Clocks for traces: of this process, of a GPU, and how those of all ranks differ."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from taktline.transport import Transport

_ROUNDS = 8
"""How often the ranks compare their clocks; the best rounds count."""


class HostClock:
    """The clock of this process."""

    error = 0
    """By how many nanoseconds a time may be wrong at most."""
    stamp = staticmethod(time.perf_counter_ns)
    """A cheap mark of this moment, to be read later."""

    def read(self, stamps: Sequence[int]) -> list[int]:
        """Stamps as nanoseconds of this process."""
        return list(stamps)


class CudaClock:
    """The clock of a GPU: a stamp marks when its current stream gets there.

    Both clocks are compared at the beginning and when stamps are read, on an idle GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.error = 0
        self._device = device
        self._first = self._compared()

    def stamp(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, stamps: Sequence[torch.cuda.Event]) -> list[int]:
        """Wait for the GPU; returns stamps as nanoseconds of this process."""
        (first, began), (last, ended) = self._first, self._compared()
        # Nanoseconds of this process in a millisecond of the GPU: the two quartzes differ a little.
        pace = (ended - began) / max(first.elapsed_time(last), 1e-6)
        if not stamps:
            return []
        # From the first stamp on: elapsed_time has seven digits only.
        base = began + pace * first.elapsed_time(stamps[0])
        return [round(base + pace * stamps[0].elapsed_time(stamp)) for stamp in stamps]

    def _compared(self) -> tuple[torch.cuda.Event, int]:
        """An event, and its time on the clock of this process."""
        torch.cuda.synchronize(self._device)
        before = time.perf_counter_ns()
        event = self.stamp()
        event.synchronize()
        after = time.perf_counter_ns()
        self.error = max(self.error, (after - before) // 2)
        return event, (before + after) // 2


Clock: TypeAlias = HostClock | CudaClock


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True)
class Offsets:
    """How far the clock of each rank is ahead of that of rank 0, in nanoseconds."""

    ahead: Sequence[int]
    error: int
    """By how many nanoseconds one of them may be wrong at most."""


def align(transport: Transport) -> Offsets:
    """Compare the clocks of all ranks, which all take part.

    No rank leaves an exchange before all have entered it. So each round bounds how far the clock of
    a rank is ahead, from below (it entered before rank 0 left) and from above::

        rank 0   ├── enters ─────── leaves ──┤
        rank r       ├── enters ─────── leaves ──┤

    Two clocks count as one, as on one machine, unless a round contradicts that.
    """
    times: list[int] = []
    for _ in range(_ROUNDS):
        times.append(time.perf_counter_ns())
        transport.exchange([0], "the clocks of a trace")
        times.append(time.perf_counter_ns())
    all_ranks = transport.exchange(times, "the clocks of a trace")
    enters, leaves = [[row[at::2] for row in all_ranks] for at in (0, 1)]
    ahead, error = [], 0
    for entered, left in zip(enters, leaves, strict=True):
        least = max(mine - zero for mine, zero in zip(entered, leaves[0], strict=True))
        most = min(mine - zero for mine, zero in zip(left, enters[0], strict=True))
        one = least <= 0 <= most
        ahead.append(0 if one else (least + most) // 2)
        error = max(error, 0 if one else (most - least) // 2)
    return Offsets(ahead, error)
