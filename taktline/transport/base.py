"""What the runtime asks of a transport: channels between ranks, and one small agreed exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

__all__ = ["Channel", "Handle", "Post", "Transport"]


class Channel(NamedTuple):
    """One direction between two ranks for one kind of data; its messages keep their order.

    A pair of ranks may carry activations and gradients the same way. Only apart from each other do
    their orders agree at both ends, so a message that waits on one channel holds up no other.
    """

    sender: int
    receiver: int
    gradients: bool

    def __str__(self) -> str:
        data = "gradients" if self.gradients else "activations"
        return f"{data} from rank {self.sender} to rank {self.receiver}"


class Handle(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Return once the buffer may be used: read after a receive, written after a send."""
        ...


Post: TypeAlias = Callable[[torch.Tensor], Handle]
"""Send a buffer, or receive into it, without waiting."""


class Transport(Protocol):
    """All that ranks can do with each other."""

    rank: int
    size: int

    def open(self, channels: Sequence[Channel]) -> None:
        """Make channels ready; every rank gives the same ones in the same order."""
        ...

    def sender(self, channel: Channel, *, eager: bool = False) -> Post:
        """What sends a buffer (contiguous bytes, left alone until its handle was waited for).

        An eager send returns at once, even where others wait until their receive is posted: a
        receiver that does not know the size yet cannot post it.
        """
        ...

    def receiver(self, channel: Channel) -> Post:
        """What receives into a buffer of the size that was sent."""
        ...

    def exchange(
        self, numbers: Sequence[int], what: str = "an exchange", *, ragged: bool = False
    ) -> list[list[int]]:
        """Give every rank the numbers of every rank; all ranks take part.

        Args:
            numbers: 64 bits each; equally many on each rank, unless ``ragged``.
            what: what it is for. If the ranks do not say the same, they are in different calls,
                and all of them raise a :class:`MismatchError`.
            ragged: whether ranks may give different amounts.
        """
        ...
