"""AllGather between ranks: every rank gets the numbers of every rank, or learns who is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from taktline.transport.base import Frame
from taktline.transport.control_plane import Member, PeerFailure, Plane
from taktline.transport.distributed import AllGather

SOON = 20.0


@pytest.fixture
def connect() -> Iterator[Callable[..., list[Any]]]:
    """Connects so many ranks, each on a thread; what became of each."""
    planes: list[Plane] = []

    def connected(size: int, seconds: float = SOON) -> list[Any]:
        store = HashStore()
        planes.extend(Plane(store, rank, size, "test") for rank in range(size))
        return each(size, lambda rank: make(planes[rank], rank, size, seconds))

    yield connected
    for plane in planes:
        plane.close()


def make(plane: Plane, rank: int, size: int, seconds: float) -> AllGather:
    member = Member(list(range(size)), "here", lambda _: None)
    plane.join(member)
    plane.meet(member, seconds)
    return AllGather(plane, member, rank, seconds)


def each(size: int, fn: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(fn, range(size)))


@pytest.mark.parametrize("size", [2, 4, 5, 7, 8])
def test_every_rank_gets_all_numbers(connect: Any, size: int) -> None:
    ranks = connect(size)
    for length in (0, 3, 1000):
        given = [bytes([rank] * (length + rank)) for rank in range(size)]
        frames = each(size, lambda rank, g=given: ranks[rank].exchange(Frame("x", g[rank])))
        assert [[f.data for f in found] for found in frames] == [given] * size


@pytest.mark.parametrize("size", [2, 6])
def test_a_rank_that_has_left(connect: Any, size: int) -> None:
    ranks = connect(size)
    ranks[size - 1].shut()
    with pytest.raises(PeerFailure) as caught:
        ranks[0].exchange(Frame("x", b"1"))
    assert not caught.value.timed_out
    assert caught.value.processes == [size - 1]


def test_all_leave_an_exchange_that_cannot_end(connect: Any) -> None:
    ranks = connect(7)
    ranks[0].shut()

    def failure(rank: int) -> PeerFailure:
        with pytest.raises(PeerFailure) as caught:
            ranks[rank].exchange(Frame("x", b"1"))
        return caught.value

    assert not any(found.timed_out for found in each(7, failure))


def test_a_rank_that_says_nothing(connect: Any) -> None:
    ranks = connect(2, seconds=0.2)
    with pytest.raises(PeerFailure) as caught:
        ranks[0].exchange(Frame("x", b"1"))
    assert caught.value.timed_out
    assert caught.value.processes == [1]


def test_who_has_not_come() -> None:
    plane = Plane(HashStore(), 0, 2, "test")
    try:
        with pytest.raises(PeerFailure) as caught:
            make(plane, 0, 2, 0.1)
        assert caught.value.processes == [1]
    finally:
        plane.close()
