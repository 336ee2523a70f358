"""Clocks: one machine has one, and those of several are compared."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from taktline.runtime.trace import align
from taktline.transport import local, transport_of
from taktline.transport.base import Channel, Frame, Post, Transport


class FarAway(Transport):
    """A transport between two clocks: what rank 1 shows is that much ahead."""

    rank, size = 0, 2

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead

    def _gather(self, mine: Frame) -> list[Frame]:
        time.sleep(0.001)
        shown = self._ahead if len(mine.numbers) > 1 else 0
        return [mine, Frame(mine.what, [number + shown for number in mine.numbers])]

    def open(self, channels: Sequence[Channel]) -> None: ...

    def sender(self, channel: Channel, *, eager: bool = False) -> Post:
        raise KeyError(channel)

    def receiver(self, channel: Channel) -> Post:
        raise KeyError(channel)


def test_clocks_of_one_machine_are_equal() -> None:
    assert local.run(lambda rank: align(transport_of()), 3) == [([0, 0, 0], 0)] * 3


@pytest.mark.parametrize("ahead", [10**15, -(10**10)])
def test_those_of_two_machines_are_compared(ahead: int) -> None:
    (first, second), error = align(FarAway(ahead))
    assert first == 0
    assert error > 0
    assert abs(second - ahead) <= error
