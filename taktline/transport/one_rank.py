"""The transport of a single rank: a pipeline without a process group."""

from __future__ import annotations

from collections.abc import Sequence

from taktline.errors import TransportError
from taktline.transport.base import Channel, Post


class Alone:
    """The transport of a pipeline that runs on one rank."""

    rank = 0
    size = 1

    def open(self, channels: Sequence[Channel]) -> None:
        """There are no channels to open."""
        for channel in channels:
            self.sender(channel)

    def sender(self, channel: Channel, *, eager: bool = False) -> Post:
        """There is no rank to send to."""
        raise TransportError(f"{channel}: this process is the only rank; start the others, too")

    def receiver(self, channel: Channel) -> Post:
        """There is no rank to receive from."""
        return self.sender(channel)

    def exchange(
        self, numbers: Sequence[int], what: str = "an exchange", *, ragged: bool = False
    ) -> list[list[int]]:
        """The numbers of the only rank."""
        return [list(numbers)]
