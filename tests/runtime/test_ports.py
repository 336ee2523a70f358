"""Ports: how many messages a sender keeps."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from taktline.meta import TensorMeta
from taktline.runtime.ports import FirstOutgoing, Outgoing, Sends
from taktline.transport import Channel
from taktline.transport.wire import Layout

PLACE = (Channel(0, 1, False), 0)


class Message:
    def __init__(self, done: bool) -> None:
        self.done = done
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def known(post: Callable[..., Message]) -> Callable[[int], None]:
    layout = Layout((TensorMeta((4,), torch.float32),))
    port = Outgoing(PLACE, post, Sends(), [layout] * 8)

    def send(microbatch: int) -> None:
        port.give(microbatch, [torch.full((4,), float(microbatch))], None)
        port.send(microbatch)

    return send


def self_described(post: Callable[..., Message]) -> Callable[[int], None]:
    port = FirstOutgoing(PLACE, post, torch.device("cpu"))
    return lambda microbatch: port.fail(microbatch)


@pytest.mark.parametrize("port", [known, self_described])
@pytest.mark.parametrize("done", [True, False], ids=["left", "under way"])
def test_messages_that_have_left_are_freed(
    port: Callable[[Callable[..., Message]], Callable[[int], None]], done: bool
) -> None:
    posted: list[Message] = []
    buffers: dict[int, weakref.ref[torch.Tensor]] = {}

    def post(buffer: torch.Tensor, marks: bytes = b"") -> Message:
        buffers[id(buffer)] = weakref.ref(buffer)
        posted.append(Message(done))
        return posted[-1]

    send = port(post)
    for microbatch in range(8):
        send(microbatch)
    alive = [buffer for buffer in buffers.values() if buffer() is not None]
    assert (len(alive) <= 2) == done
    assert done or not any(message.waits for message in posted)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_limit_for_the_messages_of_all_ports(limit: int) -> None:
    posted: list[Message] = []
    layout, sends = Layout((TensorMeta((4,), torch.float32),)), Sends(limit)

    def post(buffer: torch.Tensor, marks: bytes | bytearray = b"", /) -> Message:
        posted.append(Message(done=False))
        return posted[-1]

    ports = [Outgoing((PLACE[0], stage), post, sends, [layout] * 4) for stage in range(2)]
    for _ in range(2):  # steps
        for microbatch in range(4):
            for port in ports:
                port.give(microbatch, [torch.ones(4)], None)
                port.send(microbatch)
                assert sum(not message.waits for message in posted) == min(limit, len(posted))
        sends.settle_all()
        assert all(message.waits == 1 for message in posted)
        posted.clear()
