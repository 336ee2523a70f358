"""Exchanges of texts, values and errors among all ranks, over a transport's exchange of numbers."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

from taktline import errors
from taktline.checks import Either, read
from taktline.errors import JsonError, TaktlineError, TransportError, text_of
from taktline.transport.base import Transport

_LONGEST = 1 << 16
"""The most characters of an error that are shared; the rank that raised it has all of them."""

_PLAIN = Either(None, bool, int, float, str)
_ERROR = (str, str, {str: _PLAIN})
_CLASSES: dict[str, type[TaktlineError]] = {name: getattr(errors, name) for name in errors.__all__}
"""The classes that a shared error may have."""


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
    rows = transport.share(text.encode(errors="surrogatepass"), what)
    return [data.decode(errors="replace") for data in rows]


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
