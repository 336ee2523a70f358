"""The interface of a transport: channels between ranks, and an exchange of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


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


class Transport(Protocol):
    """How a rank reaches the others."""

    rank: int
    size: int

    def open(self, channels: Sequence[Channel]) -> None:
        """Connect channels; every rank passes the same ones in the same order."""
        ...

    def sender(self, channel: Channel, *, eager: bool = False) -> Post:
        """Return the function that sends a buffer: contiguous, unchanged until the wait ends.

        An eager send returns at once, even where others block until their receive is posted: a
        receiver that does not know the size yet cannot post it.
        """
        ...

    def receiver(self, channel: Channel) -> Post:
        """Return the function that receives into a buffer of the size that was sent."""
        ...

    def exchange(
        self, numbers: Sequence[int], what: str = "an exchange", *, ragged: bool = False
    ) -> list[list[int]]:
        """Return the numbers of every rank; all ranks take part.

        Args:
            numbers: 64 bits each; equally many on each rank, unless ``ragged``.
            what: the purpose. If ranks pass different texts, they are in different calls, and all
                of them raise a :class:`MismatchError`.
            ragged: whether ranks may pass different amounts.
        """
        ...


class Watched(Protocol):
    """A step that is running."""

    def tick(self) -> None:
        """Look at the step; called some times a second."""
        ...
