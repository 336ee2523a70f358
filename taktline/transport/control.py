"""The small agreed exchanges of texts and errors, over a transport's exchange of numbers."""

from __future__ import annotations

import json

from taktline import errors
from taktline.errors import TaktlineError
from taktline.transport.base import Transport

__all__ = ["share_error", "share_texts"]


def share_texts(transport: Transport, text: str) -> list[str]:
    """Give every rank the text of every rank; all ranks take part.

    >>> from taktline.transport.alone import Alone
    >>> share_texts(Alone(), "größer")
    ['größer']
    """
    data = text.encode()
    lengths = [numbers[0] for numbers in transport.exchange([len(data)])]
    words = -(-max(lengths) // 8)
    padded = data.ljust(8 * words, b"\0")
    numbers = [
        int.from_bytes(padded[8 * i : 8 * i + 8], "little", signed=True) for i in range(words)
    ]
    return [
        b"".join(number.to_bytes(8, "little", signed=True) for number in row)[:length].decode()
        for row, length in zip(transport.exchange(numbers), lengths, strict=True)
    ]


def _plain(error: TaktlineError) -> dict[str, object]:
    """The fields of an error that are plain values; its text says the rest."""
    plain = (bool, int, float, str, type(None))
    return {name: value for name, value in vars(error).items() if isinstance(value, plain)}


def share_error(transport: Transport, error: TaktlineError | None) -> TaktlineError | None:
    """Give every rank the error of the lowest rank that has one; all ranks take part."""
    told = "" if error is None else json.dumps([type(error).__name__, str(error), _plain(error)])
    for rank, text in enumerate(share_texts(transport, told)):
        if text and rank == transport.rank:
            return error
        if text:
            name, words, fields = json.loads(text)
            return errors.restore(getattr(errors, name), (words,), fields)
    return None
