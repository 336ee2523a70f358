"""The messages of an exchange: each has its purpose in it, so that a mix-up can be reported.

A frame is words of 8 bytes::

    word 0     version of this format, with a mark
    word 1     how many numbers there are
    word 2 …   the purpose of the exchange, a text of up to 48 bytes
    word 8 …   the numbers
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from taktline.errors import MismatchError, TransportError
from taktline.text import by_rank

_MARK = 0x7A4B74616B740002
"""The last two bytes are the version."""
_HEAD = struct.Struct("<2q48s")
_MOST = 1 << 24
"""More numbers than an exchange takes: 128 MiB."""


class Frame(NamedTuple):
    """The numbers of one rank, and what they are for."""

    what: str
    numbers: list[int]

    @classmethod
    def size(cls, data: bytes | bytearray, at: int, rank: int) -> int | None:
        """The number of bytes of the frame at an offset; None if its head is not complete."""
        if len(data) - at < _HEAD.size:
            return None
        mark, count, _ = _HEAD.unpack_from(data, at)
        if mark != _MARK:
            raise TransportError(
                f"rank {rank} has sent no message of an exchange, or one of another version; "
                "install the same version of Taktline on every rank"
            )
        if not 0 <= count <= _MOST:
            raise TransportError(f"rank {rank} announces {count:,} numbers, more than there can be")
        return _HEAD.size + 8 * count

    @classmethod
    def read(cls, data: bytes) -> Frame:
        """The frame in these bytes, which are all of it."""
        _, count, what = _HEAD.unpack_from(data)
        numbers = struct.unpack_from(f"<{count}q", data, _HEAD.size)
        return cls(what.rstrip(b"\0").decode(errors="replace"), list(numbers))


def framed(numbers: Sequence[int], what: str) -> bytes:
    """The bytes of a frame."""
    count = len(numbers)
    if count > _MOST:
        raise TransportError(f"{what} takes {count:,} numbers; at most {_MOST:,} can be shared")
    return _HEAD.pack(_MARK, count, what.encode()[:48]) + struct.pack(f"<{count}q", *numbers)


def agreed(frames: Sequence[Frame], *, ragged: bool) -> None:
    """Raise the same error on every rank unless all ranks are in the same exchange.

    With ``ragged``, ranks may bring different amounts.
    """
    calls = [frame.what for frame in frames]
    if len(set(calls)) > 1:
        raise MismatchError(
            f"the ranks disagree on the call: {by_rank(calls)}; make the same calls in the same "
            "order on every rank"
        )
    counts = [len(frame.numbers) for frame in frames]
    if not ragged and len(set(counts)) > 1:
        raise TransportError(
            f"{calls[0]} takes equally many numbers of each rank, but got {by_rank(counts)}"
        )
