"""The messages of an exchange: each says what it is for, so that a mix-up becomes a sentence.

A frame has one size, whatever it carries, so that every rank can receive every other rank's. What
does not fit follows in a message whose size all ranks know by then::

    word 0     version of this format, with a mark
    word 1     how many numbers there are
    word 2 …   what the exchange is for, a text of up to 48 bytes
    word 8 …   the numbers, up to 120 of them
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from taktline.errors import MismatchError, TransportError
from taktline.plan.words import by_rank

__all__ = ["FRAME", "Frame", "agreed", "framed"]

_MARK = 0x7A4B74616B740001
"""The last two bytes are the version."""
_WHAT = struct.Struct("<6q")
_HEAD = 8
FRAME = 128
"""Words in a frame, of 8 bytes each."""
_MOST = 1 << 24
"""More numbers than an exchange takes: 128 MiB."""


class Frame(NamedTuple):
    """What one rank has said so far; ``total`` is how many numbers there are in all."""

    total: int
    what: str
    numbers: list[int]
    """Those that fit into the frame."""

    @property
    def missing(self) -> int:
        """How many numbers are still to come."""
        return self.total - len(self.numbers)

    @classmethod
    def read(cls, words: torch.Tensor, rank: int) -> Frame:
        """A frame that has arrived from a rank."""
        mark, count, *text = words[:_HEAD].tolist()
        if mark != _MARK:
            raise TransportError(
                f"rank {rank} has sent what is no message of an exchange, or one of another "
                "version; install the same version of Taktline on every rank"
            )
        if not 0 <= count <= _MOST:
            raise TransportError(f"rank {rank} announces {count:,} numbers, more than there can be")
        what = _WHAT.pack(*text).rstrip(b"\0").decode(errors="replace")
        return cls(count, what, words[_HEAD : _HEAD + count].tolist())


def framed(numbers: Sequence[int], what: str) -> torch.Tensor:
    """The words of a frame; ``numbers`` beyond it are left to the next message.

    >>> frame = Frame.read(framed([3, 4], "grad_norm()"), rank=0)
    >>> frame.what, frame.numbers, frame.missing
    ('grad_norm()', [3, 4], 0)
    """
    if len(numbers) > _MOST:
        raise TransportError(
            f"{what} takes {len(numbers):,} numbers; at most {_MOST:,} can be shared"
        )
    words = [_MARK, len(numbers), *_label(what), *numbers[: FRAME - _HEAD]]
    return torch.tensor(words + [0] * (FRAME - len(words)), dtype=torch.int64, device="cpu")


@lru_cache
def _label(what: str) -> tuple[int, ...]:
    return _WHAT.unpack(what.encode()[: _WHAT.size].ljust(_WHAT.size, b"\0"))


def agreed(frames: Sequence[Frame], *, ragged: bool) -> None:
    """Raise, the same on every rank, unless all ranks are in the same exchange.

    ``ragged`` says that they may bring different amounts.
    """
    calls = [frame.what for frame in frames]
    if len(set(calls)) > 1:
        raise MismatchError(
            f"the ranks disagree on the call: {by_rank(calls)}; make the same calls in the same "
            "order on every rank"
        )
    counts = [frame.total for frame in frames]
    if not ragged and len(set(counts)) > 1:
        raise TransportError(
            f"{calls[0]} takes equally many numbers of each rank, but got {by_rank(counts)}"
        )
