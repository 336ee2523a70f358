"""Ports: how many messages a sender keeps, and that what a peer sends is checked.

Nothing that a message names is found or run, and no rank hangs.
"""

from __future__ import annotations

import re
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import taktline as tl
from taktline.errors import SignatureError, TransportError
from taktline.meta import TensorMeta
from taktline.runtime import ports
from taktline.runtime.ports import Outgoing, Sends
from taktline.transport import Channel, codec
from taktline.transport.wire import Layout
from tests.workers import Workers

PLACE = (Channel(0, 1, False), 0)


class Message:
    def __init__(self, done: bool) -> None:
        self.done = done
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def known(post: Callable[..., Message]) -> Callable[[int], None]:
    layout = Layout((TensorMeta((4,), torch.float32),))
    port = Outgoing(PLACE, post, Sends(), layouts=[layout] * 8)

    def send(microbatch: int) -> None:
        port.give(microbatch, [torch.full((4,), float(microbatch))], None)
        port.send(microbatch)

    return send


def self_described(post: Callable[..., Message]) -> Callable[[int], None]:
    port = Outgoing(PLACE, post, Sends())
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

    ports = [Outgoing((PLACE[0], stage), post, sends, layouts=[layout] * 4) for stage in range(2)]
    for _ in range(2):  # steps
        for microbatch in range(4):
            for port in ports:
                port.give(microbatch, [torch.ones(4)], None)
                port.send(microbatch)
                assert sum(not message.waits for message in posted) == min(limit, len(posted))
        sends.settle_all()
        assert all(message.waits == 1 for message in posted)
        posted.clear()


# Messages that a peer has forged.

CPU = torch.device("cpu")
TENSOR = '{"dtype": "float32", "shape": [2, 4], "grad": true, "sharding": null}'


def run(schedule: Any, size: int = 4) -> list[float]:
    losses: list[torch.Tensor] = []
    schedule.step(torch.ones(size, 4), target=torch.zeros(size, 4), losses=losses)
    return [float(loss) for loss in losses]


POPEN = '["collections:namedtuple", {"$": "type", "of": "subprocess:Popen"}, [null]]'
UNKNOWN = "does not know the received container 'collections.namedtuple'"


def incoming(*messages: bytes) -> ports.Incoming:
    """What receives these messages."""
    left = list(messages)

    class Done:
        done = True

        def wait(self) -> None: ...

    def post(buffer: torch.Tensor, marks: bytes | bytearray = b"") -> Done:
        buffer.copy_(torch.frombuffer(bytearray(left.pop(0)), dtype=torch.uint8))
        return Done()

    stage = tl.PipelineStage(nn.Identity(), 1, 2, CPU)
    port = ports.Incoming(post, stage, ports.Queue())
    port.post(0)
    return port


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f'[[{{"$": "tuple", "of": ["touch", "{{path}}"]}}], {POPEN}]', "neither a tensor nor"),
        (f"[[{TENSOR}], {POPEN}]", UNKNOWN),
        (f'[[{TENSOR}], ["subprocess:Popen", null, [null]]]', "'subprocess.Popen'"),
        (
            f'[[{TENSOR}], ["torch:_inductor", null, [null]]]',
            "received container 'torch._inductor'",
        ),
        ("{}", "a description of values: the value is an object, not a list"),
        ("[" * 50_000, "nested deeper"),
        ("\0", "not JSON"),
        ("[[1e999], null]", "[0][0] is inf, not a finite number"),
        (f"[[{TENSOR}, {TENSOR}], null]", "is not as long as"),
        ("[[], null]", "is not as long as"),
        (TENSOR.join(("[[", "], null]")).replace("[2, 4]", "[2, -4]"), "no tensor is float32"),
        (TENSOR.join(("[[", "], null]")).replace("float32", "Tensor"), "no tensor is Tensor"),
        (TENSOR.join(("[[", "], null]")).replace("2,", f"{2**60},"), "no tensor is float32"),
    ],
    ids=lambda value: value[:40],
)
def test_a_forged_description(text: str, reason: str, tmp_path: Path) -> None:
    target = tmp_path / "run"
    sent = text.replace("{path}", str(target)).encode()
    with pytest.raises(SignatureError, match=re.escape(reason)):
        incoming(struct.pack("<3q", ports._DONE, len(sent), 1), sent, bytes(1)).take(0)
    assert not target.exists()


@pytest.mark.parametrize(
    "numbers",
    [[0, 0, 0], [1, 4, 0]] + [[ports._DONE, *sizes] for sizes in ([-1, 0], [2**62, 0], [4, 2**55])],
    ids=str,
)
def test_an_invalid_head_of_a_message(numbers: list[int]) -> None:
    with pytest.raises(TransportError, match="what has arrived is not a message, or is larger"):
        incoming(struct.pack("<3q", *numbers)).take(0)


def test_a_message_is_fetched_whole_before_it_is_read() -> None:
    port = incoming(struct.pack("<3q", ports._DONE, 3, 48), b"{}}", bytes(48))
    with pytest.raises(SignatureError):
        port.take(0)
    assert not port._queue


class Secret(NamedTuple):
    value: Any


class Sender(nn.Linear):
    def forward(self, input: torch.Tensor) -> Any:
        return Secret(super().forward(input))


class Taker(nn.Linear):
    def forward(self, input: Any) -> torch.Tensor:
        return super().forward(input.value)


def send_unknown(rank: int, group: dist.ProcessGroup) -> Any:
    """Two steps, the second one after the container was registered."""
    codec._registered.pop(f"{__name__}:Secret", None)
    module = Taker(4, 4) if rank else Sender(4, 4)
    stage = tl.PipelineStage(module, rank, 2, CPU, group=group)
    schedule = tl.ScheduleGPipe(stage, 2, nn.functional.mse_loss)
    with pytest.raises(tl.StageError) as caught:
        run(schedule)
    tl.register_container(Secret)
    return str(caught.value), len(run(schedule, size=8))


@pytest.mark.processes
def test_a_named_tuple_crosses_once_it_is_registered(workers: Workers) -> None:
    text = (
        "rank 1, stage 1, micro-batch 0 (1F0): SignatureError: this rank does not know the "
        f"received container '{__name__}.Secret'; on every rank, call "
        "taktline.register_container with its class, or import the module that registers it"
    )
    assert workers.run(send_unknown) == [(text, 0), (text, 2)]
