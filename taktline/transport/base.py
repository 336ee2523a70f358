"""The interface of a transport: channels between ranks, and an exchange of numbers.

Also what is the same over all transports: that of a single rank, and turns of threads.
"""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from taktline.errors import MismatchError, TransportError, UseError
from taktline.text import by_rank


class Channel(NamedTuple):
    """One direction between two ranks for one kind of data; its messages keep their order.

    Activations and gradients may go the same way between two ranks. Their orders agree at both ends
    only if kept apart, so each has a channel, and a message that waits holds up no other channel.
    """

    sender: int
    receiver: int
    gradients: bool

    def __str__(self) -> str:
        data = "gradients" if self.gradients else "activations"
        return f"{data} from rank {self.sender} to rank {self.receiver}"


class Handle(Protocol):
    """A message under way."""

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` is known to return at once."""
        ...

    def wait(self) -> object:
        """Return once the buffer may be used: read after a receive, written after a send."""
        ...


class Post(Protocol):
    """Sends a buffer, or receives into it, without waiting.

    The ``marks``, a few bytes, travel with it; not between GPUs, as reading them would wait.
    """

    def __call__(self, buffer: torch.Tensor, marks: bytes | bytearray = b"", /) -> Handle: ...


def bytes_of(buffer: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in its memory."""
    return buffer.detach().view(-1).view(torch.uint8)


class Frame(NamedTuple):
    """What a rank brings to an exchange: the purpose, and its data."""

    what: str
    data: bytes


class Transport(ABC):
    """How a rank reaches the others."""

    rank: int
    size: int

    @abstractmethod
    def open(self, channels: Sequence[Channel]) -> None:
        """Connect channels; every rank passes the same ones in the same order."""

    @abstractmethod
    def sender(self, channel: Channel, *, eager: bool = False) -> Post:
        """Return the function that sends a buffer: contiguous, unchanged until the wait ends.

        An eager send returns at once, even where others block until their receive is posted: a
        receiver that does not know the size yet cannot post it.
        """

    @abstractmethod
    def receiver(self, channel: Channel) -> Post:
        """Return the function that receives into a buffer of the size that was sent."""

    @abstractmethod
    def _gather(self, mine: Frame) -> list[Frame]:
        """What each rank brings to an exchange."""

    def share(self, data: bytes, what: str) -> list[bytes]:
        """Return the bytes of every rank; all ranks take part.

        ``what`` is the purpose. If ranks pass different texts, they are in different calls, and all
        of them raise a :class:`MismatchError`.
        """
        frames = self._gather(Frame(what, data))
        calls = [frame.what for frame in frames]
        if len(set(calls)) > 1:
            raise MismatchError(
                f"the ranks disagree on the call: {by_rank(calls)}; make the same calls in the "
                "same order on every rank"
            )
        return [frame.data for frame in frames]

    def exchange(
        self, numbers: Sequence[int], what: str = "an exchange", *, ragged: bool = False
    ) -> list[list[int]]:
        """Return the numbers of every rank, as :meth:`share` does.

        Args:
            numbers: 64 bits each; equally many on each rank, unless ``ragged``.
            what: the purpose.
            ragged: whether ranks may pass different amounts.
        """
        rows = self.share(struct.pack(f"<{len(numbers)}q", *numbers), what)
        counts = [len(row) // 8 for row in rows]
        if not ragged and len(set(counts)) > 1:
            raise TransportError(
                f"{what} takes equally many numbers of each rank, but got {by_rank(counts)}"
            )
        return [list(struct.unpack_from(f"<{len(row) // 8}q", row)) for row in rows]


class Alone(Transport):
    """The transport of a pipeline that runs on one rank."""

    rank = 0
    size = 1

    def open(self, channels: Sequence[Channel]) -> None:
        for channel in channels:
            self.sender(channel)

    def sender(self, channel: Channel, *, eager: bool = False) -> Post:
        raise TransportError(f"{channel}: this process is the only rank; start the others, too")

    def receiver(self, channel: Channel) -> Post:
        return self.sender(channel)

    def _gather(self, mine: Frame) -> list[Frame]:
        return [mine]


class Watched(Protocol):
    """A step that is running."""

    def tick(self) -> None:
        """Look at the step; called some times a second."""
        ...


class Turn:
    """A block for one call at a time: another thread is refused, and so is a nested block."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._thread = ""

    def __enter__(self) -> None:
        here = threading.current_thread().name
        if not self._lock.acquire(blocking=False):
            raise UseError(
                f"{self._what} is running in thread {self._thread!r}, and was called again from "
                f"thread {here!r}; it runs once at a time: call it from outside of a stage's "
                "forward, a loss function or a hook, and let threads wait for each other"
            )
        self._thread = here

    def __exit__(self, *_: object) -> None:
        self._lock.release()
