"""Lanes: small messages arrive in their order, senders wait for nobody, and an end is an error."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from typing import Any

import pytest
import torch

from taktline.errors import LostRankError
from taktline.transport.base import Channel
from taktline.transport.distributed import Distributed
from taktline.transport.lanes import Lane
from tests.workers import Workers

SOON = 20.0


def lost(timed_out: bool) -> LostRankError:
    return LostRankError("in vain" if timed_out else "ended")


def between(seconds: float) -> tuple[Lane, Lane]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return Lane(ends[0], seconds, lost), Lane(ends[1], seconds, lost)


@pytest.fixture
def lanes() -> tuple[Lane, Lane]:
    return between(SOON)


def message(number: int, size: int) -> torch.Tensor:
    return torch.full((size,), number % 251, dtype=torch.uint8)


def test_messages_keep_their_order_both_ways(lanes: tuple[Lane, Lane]) -> None:
    for sender, receiver in (lanes, lanes[::-1]):
        sent = [message(m, 1 + 7 * m) for m in range(20)]
        buffers = [torch.empty_like(each) for each in sent]
        handles = [receiver.receive(buffer) for buffer in buffers]
        for each in sent:
            sender.send(each).wait()
        handles[-1].wait()  # with it, all before it are here
        for handle in handles:
            handle.wait()
        assert all(map(torch.equal, sent, buffers))


def test_a_message_that_waits_is_not_copied(lanes: tuple[Lane, Lane]) -> None:
    sent = message(5, 1 << 26)
    tracemalloc.start()
    try:
        handle = lanes[0].send(sent, b"marks")
        assert not handle.done
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    buffer, marks = torch.empty_like(sent), bytearray(5)
    lanes[1].receive(buffer, marks).wait()
    handle.wait()
    assert torch.equal(sent, buffer)
    assert marks == b"marks"


def test_a_sender_does_not_wait_for_a_receiver_that_is_busy(lanes: tuple[Lane, Lane]) -> None:
    sent = [message(m, 1 << 16) for m in range(200)]  # more than the kernel has room for
    handles = [lanes[0].send(each) for each in sent]
    assert threading.active_count() > 1
    for each in sent:
        buffer = torch.empty_like(each)
        lanes[1].receive(buffer).wait()
        assert torch.equal(buffer, each)
    for handle in handles:
        handle.wait()
    lanes[0].send(message(3, 5)).wait()  # and small ones go on as before
    buffer = torch.empty(5, dtype=torch.uint8)
    lanes[1].receive(buffer).wait()
    assert buffer.tolist() == [3] * 5


def test_a_lane_that_has_ended(lanes: tuple[Lane, Lane]) -> None:
    handles = [lanes[0].send(message(m, 1 << 16)) for m in range(200)]
    lanes[1].shut()
    with pytest.raises(LostRankError, match="ended"):
        lanes[0].receive(message(0, 8)).wait()
    with pytest.raises(LostRankError, match="ended"):
        handles[-1].wait()
    with pytest.raises(LostRankError, match="ended"):
        lanes[0].send(message(0, 8))


def test_a_message_that_does_not_come() -> None:
    sender, receiver = between(0.2)
    sender.send(message(0, 5)).wait()
    with pytest.raises(LostRankError, match="in vain"):
        receiver.receive(message(0, 8)).wait()


def test_a_message_that_nobody_takes() -> None:
    sender, _receiver = between(0.2)
    handles = [sender.send(message(m, 1 << 16)) for m in range(200)]
    with pytest.raises(LostRankError, match="in vain"):
        handles[-1].wait()


def alternate(rank: int, group: Any) -> bool:
    """Whether messages small and large, of both kinds, arrive as they were sent."""
    transport = Distributed.of(group)
    other = 1 - rank
    kinds = (False, True)
    transport.open([Channel(a, b, kind) for a, b in ((0, 1), (1, 0)) for kind in kinds])
    sizes = [16, 1 << 16, (1 << 16) + 1, 100, 1 << 18, 1]
    buffers, handles = {}, []
    for kind in kinds:
        receive = transport.receiver(Channel(other, rank, kind))
        for m, size in enumerate(sizes):
            buffers[kind, m] = torch.empty(size, dtype=torch.uint8)
            handles.append(receive(buffers[kind, m]))
    for m, size in enumerate(sizes):
        for kind in reversed(kinds):
            data = message(10 * m + kind + 100 * rank, size)
            handles.append(transport.sender(Channel(rank, other, kind))(data))
    for handle in handles:
        handle.wait()
    return all(
        torch.equal(buffer, message(10 * m + kind + 100 * other, sizes[m]))
        for (kind, m), buffer in buffers.items()
    )


@pytest.mark.processes
def test_small_and_large_messages_of_a_channel(workers: Workers) -> None:
    assert workers.run(alternate) == [True, True]


def test_a_message_is_done_when_its_buffer_may_be_used(lanes: tuple[Lane, Lane]) -> None:
    small, large = message(1, 100), message(2, 1 << 23)
    arriving = [lanes[1].receive(torch.empty_like(each)) for each in (small, large)]
    assert not arriving[0].done
    leaving = [lanes[0].send(each) for each in (small, large)]
    assert leaving[0].done
    arriving[0].wait()
    assert arriving[0].done
    arriving[1].wait()
    leaving[1].wait()
    assert arriving[1].done
    assert leaving[1].done
    *_, stuck = (lanes[0].send(large) for _ in range(2))
    assert not stuck.done
    lanes[1].shut()
    with pytest.raises(LostRankError):
        stuck.wait()
    assert not stuck.done
