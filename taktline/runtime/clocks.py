"""What tells the time: of this process, of a GPU, and of all ranks together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from taktline.transport import Transport

__all__ = ["Clock", "CudaClock", "HostClock", "Offsets", "align", "clock_for"]

_ROUNDS = 8
"""How often the ranks look at their clocks together; the best rounds count."""


class Clock(Protocol):
    """Stamps that cost little when they are made, and are read later."""

    error: int
    """By how many nanoseconds what is read may be wrong at most."""

    def stamp(self) -> Any:
        """This moment, in the order of what the device does."""
        ...

    def read(self, stamps: Sequence[Any]) -> list[int]:
        """Stamps as nanoseconds of this process."""
        ...


class HostClock:
    """The clock of this process.

    >>> clock = HostClock()
    >>> before, after = clock.read([clock.stamp(), clock.stamp()])
    >>> before <= after
    True
    """

    error = 0
    stamp = staticmethod(time.perf_counter_ns)

    def read(self, stamps: Sequence[int]) -> list[int]:
        """They are nanoseconds already."""
        return list(stamps)


class CudaClock:
    """The clock of a GPU: a stamp is when its current stream gets there.

    Where both clocks are known to show the same moment, at the beginning and when stamps are read,
    the GPU has nothing left to do.
    """

    def __init__(self, device: torch.device) -> None:
        self.error = 0
        self._device = device
        self._first = self._meet()

    def stamp(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, stamps: Sequence[torch.cuda.Event]) -> list[int]:
        """Wait for the GPU, and translate."""
        (first, began), (last, ended) = self._first, self._meet()
        # Nanoseconds of this process for one of the GPU's milliseconds: quartzes differ a little.
        pace = (ended - began) / max(first.elapsed_time(last), 1e-6)
        if not stamps:
            return []
        # From one of themselves, since times are told in seven digits only.
        base = began + pace * first.elapsed_time(stamps[0])
        return [round(base + pace * stamps[0].elapsed_time(stamp)) for stamp in stamps]

    def _meet(self) -> tuple[torch.cuda.Event, int]:
        """An event, and when it was."""
        torch.cuda.synchronize(self._device)
        before = time.perf_counter_ns()
        event = self.stamp()
        event.synchronize()
        after = time.perf_counter_ns()
        self.error = max(self.error, (after - before) // 2)
        return event, (before + after) // 2


def clock_for(device: torch.device) -> Clock:
    """The clock of what computes."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True)
class Offsets:
    """How far the clock of each rank is ahead of that of rank 0, in nanoseconds."""

    ahead: Sequence[int]
    error: int
    """By how much one of them may be wrong at most."""


def align(transport: Transport) -> Offsets:
    """Compare the clocks of all ranks, which all take part.

    Nobody leaves an exchange before everybody has entered it. So each round tells of the clock of
    a rank how far it is ahead at least (it entered before rank 0 left) and at most::

        rank 0   ├── enters ─────── leaves ──┤
        rank r       ├── enters ─────── leaves ──┤

    If no round contradicts that two clocks are one, as they are on one machine, they are taken as
    one.

    >>> from taktline.transport.one_rank import Alone
    >>> align(Alone())
    Offsets(ahead=[0], error=0)
    """
    looks: list[int] = []
    for _ in range(_ROUNDS):
        looks.append(time.perf_counter_ns())
        transport.exchange([0], "the clocks of a trace")
        looks.append(time.perf_counter_ns())
    everyone = transport.exchange(looks, "the clocks of a trace")
    enters, leaves = [[row[at::2] for row in everyone] for at in (0, 1)]
    ahead, error = [], 0
    for entered, left in zip(enters, leaves, strict=True):
        least = max(mine - zero for mine, zero in zip(entered, leaves[0], strict=True))
        most = min(mine - zero for mine, zero in zip(left, enters[0], strict=True))
        one = least <= 0 <= most
        ahead.append(0 if one else (least + most) // 2)
        error = max(error, 0 if one else (most - least) // 2)
    return Offsets(ahead, error)
