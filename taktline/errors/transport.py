"""Errors between ranks."""

from __future__ import annotations

from taktline.errors import TaktlineError

__all__ = [
    "DeadlockError",
    "LostRankError",
    "StallError",
    "TransportError",
]


class TransportError(TaktlineError):
    """Ranks cannot talk to each other as asked.

    >>> raise TransportError("activations from rank 0 to rank 1: 8 bytes sent, 4 bytes awaited")
    Traceback (most recent call last):
    taktline.errors.TransportError: activations from rank 0 to rank 1: 8 bytes sent, 4 bytes awaited
    """


class DeadlockError(TransportError):
    """Every rank waits for another; the text says who waits for what.

    >>> raise DeadlockError("no rank can go on\\n  rank 0 waits for rank 1\\n  rank 1 has ended")
    Traceback (most recent call last):
    taktline.errors.DeadlockError: no rank can go on
      rank 0 waits for rank 1
      rank 1 has ended
    """

    recoverable = "restart"


class LostRankError(TransportError):
    """Another rank has ended, has raised and left, or cannot be reached any more.

    ``peer`` is that rank among all processes of the job, if it is known.

    >>> raise LostRankError("rank 1 has lost rank 0", peer=0)
    Traceback (most recent call last):
    taktline.errors.LostRankError: rank 1 has lost rank 0
    """

    recoverable = "restart"

    def __init__(self, text: str, *, peer: int | None = None) -> None:
        self.peer = peer
        super().__init__(text)


class StallError(TransportError):
    """Another rank did not answer in time; ``peer`` is that rank in the job, if it is known.

    >>> raise StallError("rank 0 has not answered rank 1 in time", peer=0)
    Traceback (most recent call last):
    taktline.errors.StallError: rank 0 has not answered rank 1 in time
    """

    recoverable = "restart"

    def __init__(self, text: str, *, peer: int | None = None) -> None:
        self.peer = peer
        super().__init__(text)


for _name in __all__:
    globals()[_name].__module__ = "taktline.errors"  # where everybody finds them
