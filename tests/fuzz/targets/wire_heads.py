"""The numbers that messages begin with: heads of values, frames of exchanges, greetings."""

from __future__ import annotations

import struct
from contextlib import suppress
from io import BytesIO
from random import Random

import torch
from torch import nn

from taktline.runtime import ports
from taktline.stage import PipelineStage
from taktline.transport import distributed as frames
from taktline.transport.base import Alone, Frame

NUMBERS = [0, 1, -1, 3, 47, 48, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, -(2**63)]


def draw(random: Random) -> tuple[str, bytes]:
    """What the bytes are meant to be, and the bytes."""
    if random.random() < 0.5:
        status = random.choice([ports._DONE, ports._DONE, ports._FAILED, 0])
        head = [status, *(random.choice(NUMBERS) for _ in range(2))]
        return "head", struct.pack("<3q", *head) + random.randbytes(80)
    numbers = [random.choice(NUMBERS) for _ in range(random.randrange(6))]
    data = frames.packed(Frame("step()", struct.pack(f"<{len(numbers)}q", *numbers)))
    for _ in range(random.randrange(4)):
        word = struct.pack("<q", random.choice([*NUMBERS, frames._MARK]))
        at = 8 * random.randrange(len(data) // 8)
        data = data[:at] + word + data[at + 8 :]
    return "frame", data


_STAGE = PipelineStage(nn.Identity(), 1, 2, torch.device("cpu"))


class _Done:
    done = True

    def wait(self) -> None:
        """It is there already."""


class _Second(Alone):
    """A rank beside another one, which has sent these bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def _gather(self, mine: Frame) -> list[Frame]:
        return [frames.unpacked(self._data), mine]


def try_(input: tuple[str, bytes]) -> None:
    """Read the bytes as a rank does."""
    kind, data = input
    if kind == "frame":
        size = frames.size_of(data, 0, 0)
        if size is not None and size <= len(data):
            _Second(data).exchange([1, 2], "step()")
        return
    sent = BytesIO(data)

    def post(buffer: torch.Tensor, marks: bytes | bytearray = b"") -> _Done:
        came = sent.read(buffer.nbytes)
        buffer.view(torch.uint8).view(-1)[: len(came)] = torch.tensor(list(came), dtype=torch.uint8)
        return _Done()

    incoming = ports.Incoming(post, _STAGE, ports.Queue())
    incoming.post(0)
    with suppress(ports.PeerFailed):
        incoming.take(0)
