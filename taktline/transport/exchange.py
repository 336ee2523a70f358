"""What ranks exchange: numbers, in frames; and in numbers texts, values and errors.

What a rank sends is a frame. Its purpose is in it, so that a mix-up can be reported::

    word 0     version of this format, with a mark
    word 1     how many numbers there are
    word 2 …   the purpose of the exchange, a text of up to 48 bytes
    word 8 …   the numbers
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from taktline import errors
from taktline.checks import Either, read
from taktline.errors import JsonError, MismatchError, TaktlineError, TransportError, text_of
from taktline.text import by_rank
from taktline.transport.base import Transport

_MARK = 0x7A4B74616B740002
"""The last two bytes are the version."""
_HEAD = struct.Struct("<2q48s")
_MOST = 1 << 24
"""More numbers than an exchange takes: 128 MiB."""
_LONGEST = 1 << 16
"""The most characters of an error that are shared; the rank that raised it has all of them."""

_PLAIN = Either(None, bool, int, float, str)
_ERROR = (str, str, {str: _PLAIN})
_CLASSES: dict[str, type[TaktlineError]] = {name: getattr(errors, name) for name in errors.__all__}
"""The classes that a shared error may have."""


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


def share_floats(
    transport: Transport, numbers: Sequence[float], what: str, *, ragged: bool = False
) -> list[tuple[float, ...]]:
    """Return the numbers of every rank, bit for bit; all ranks take part.

    With ``ragged``, ranks may pass different amounts.
    """
    rows = transport.exchange(as_integers(numbers), what, ragged=ragged)
    return [as_floats(row) for row in rows]


def as_integers(numbers: Sequence[float]) -> tuple[int, ...]:
    """The bits of floats, as whole numbers that can be exchanged.

    >>> as_floats(as_integers([0.1, float("inf")]))
    (0.1, inf)
    """
    return struct.unpack(f"<{len(numbers)}q", struct.pack(f"<{len(numbers)}d", *numbers))


def as_floats(bits: Sequence[int]) -> tuple[float, ...]:
    """The floats that have these bits."""
    return struct.unpack(f"<{len(bits)}d", struct.pack(f"<{len(bits)}q", *bits))


def share_texts(transport: Transport, text: str, what: str = "an exchange of texts") -> list[str]:
    """Return the text of every rank; all ranks take part, with the same purpose."""
    data = text.encode(errors="surrogatepass")
    words = np.frombuffer(data.ljust(-(-len(data) // 8) * 8, b"\0"), "<i8").tolist()
    rows = transport.exchange([len(data), *words], what, ragged=True)
    return [_text_in(row, rank, what) for rank, row in enumerate(rows)]


def share_values(
    transport: Transport, value: Any, shape: Any, call: str, *, what: str
) -> list[Any]:
    """Return the JSON value of every rank, each of the given shape; all ranks take part.

    >>> from taktline.transport.base import Alone
    >>> share_values(Alone(), {"step": 3}, {"step": int}, "an example", what="the step")
    [{'step': 3}]
    """
    texts = share_texts(transport, json.dumps(value), call)
    return [read(text, shape, what=f"{what} of rank {rank}") for rank, text in enumerate(texts)]


def _text_in(row: list[int], rank: int, what: str) -> str:
    if not row or not 0 <= row[0] <= 8 * (len(row) - 1):
        raise TransportError(f"rank {rank} has sent no text ({what})")
    data = np.array(row[1:], "<i8").tobytes()[: row[0]]
    return data.decode(errors="replace")


def share_error(transport: Transport, error: TaktlineError | None) -> TaktlineError | None:
    """Return the error of the lowest rank that has one; all ranks take part."""
    told = "" if error is None else written(error)
    for rank, text in enumerate(share_texts(transport, told, "what went wrong")):
        if text and rank == transport.rank:
            return error
        if text:
            return restored(text, rank)
    return None


def exchange_or_raise(
    transport: Transport, error: TaktlineError | None, what: str, numbers: Sequence[int] = ()
) -> list[list[int]]:
    """Return the numbers of every rank; an error of one rank is raised on all of them.

    >>> from taktline.transport.base import Alone
    >>> exchange_or_raise(Alone(), None, "an example", [3, 4])
    [[3, 4]]
    """
    rows = transport.exchange([int(error is not None), *numbers], what)
    if any(failed for failed, *_ in rows):
        raise share_error(transport, error) or TransportError(
            f"{what}: a rank failed without saying why; look at the other ranks' output"
        )
    return [shared for _, *shared in rows]


def retold(error: TaktlineError, text: str) -> TaktlineError:
    """The same error with another text."""
    made = errors.restore(type(error), (text,), vars(error))
    made.__cause__ = error.__cause__
    return made


def written(error: TaktlineError, most: int = _LONGEST) -> str:
    """An error as text, from which another rank can restore it; its texts are cut to a length.

    >>> restored(written(TransportError("no way", peer=3)), rank=2).peer
    3
    """
    # Other ranks may not know a class of the user's own, so its base class is sent.
    name = next(cls.__name__ for cls in type(error).__mro__ if _CLASSES.get(cls.__name__) is cls)
    # The fields that are plain values; the text says the rest.
    fields = {
        name: text_of(value, most) if isinstance(value, str) else value
        for name, value in vars(error).items()
        if _is_plain(value) and not name.startswith("_")
    }
    return json.dumps([name, text_of(error, most), fields])


def _is_plain(value: object) -> bool:
    if type(value) is float:
        return value - value == 0  # neither nan nor infinite
    if type(value) is int:
        return abs(value) < 2**62
    return value is None or type(value) in (bool, str)


def restored(text: str, rank: int) -> Any:
    """The error that a rank has written."""
    try:
        name, words, fields = read(text, _ERROR, what=f"what rank {rank} has raised")
    except JsonError as error:
        return TransportError(f"{error}; look at the output of rank {rank}")
    if name not in _CLASSES or any(field.startswith("_") for field in fields):
        return TransportError(f"rank {rank} has raised an error that cannot be restored: {words}")
    return errors.restore(_CLASSES[name], (words,), fields)
