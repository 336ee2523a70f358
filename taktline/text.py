"""Pieces of sentences, and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def counted(number: int, noun: str) -> str:
    """A number with its noun in the right form.

    >>> counted(1, "stage"), counted(1200, "micro-batch")
    ('1 stage', '1,200 micro-batches')
    """
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def first_of(names: Sequence[str]) -> str:
    """The first name, and how many others there are.

    >>> first_of(["embed"]), first_of(["embed", "head", "norm"])
    ('embed', 'embed and 2 others')
    """
    return names[0] + (f" and {counted(len(names) - 1, 'other')}" if len(names) > 1 else "")


def by_rank(values: Sequence[object]) -> str:
    """The value of each rank, unless it is None; ranks with the same value are listed together.

    >>> by_rank([8, 4, None, 4])
    '8 on rank 0; 4 on rank 1, 3'
    """
    return "; ".join(
        f"{value} on rank {', '.join(str(r) for r, v in enumerate(values) if v == value)}"
        for value in dict.fromkeys(values)
        if value is not None
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the known names that are most like a name; else a list of known names.

    >>> did_you_mean("layer.1", ["layers.1", "head"]), did_you_mean("x", ["layers.1", "head"])
    ("did you mean 'layers.1'?", "there are 'layers.1', 'head'")
    """
    names = list(known)
    if close := get_close_matches(name, names, 3):
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"there are {', '.join(map(repr, names[:8]))}{', …' if len(names) > 8 else ''}"


def size_text(count: float) -> str:
    """A number of bytes, with a unit.

    >>> size_text(1536), size_text(12)
    ('1.5 KiB', '12 B')
    """
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.1f} {_UNITS[power]}" if power else f"{count:g} B"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_in(text: str) -> float | None:
    """The bytes that a text such as "16GiB" or "500 MB" says; None if it says none.

    >>> size_in("16GiB"), size_in("1.5 kB"), size_in("many")
    (17179869184.0, 1500.0, None)
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*([kKMGT]?)(i?)B\s*", text)
    if found is None:
        return None
    number, letter, binary = found.groups()
    return float(number) * (1024 if binary else 1000) ** " KMGT".index(letter.upper() or " ")


def memory_text(amount: float, unit: str) -> str:
    """An amount of memory: its number, and its unit where this is bytes.

    >>> memory_text(4.0, "micro-batches"), memory_text(2048, "bytes")
    ('4', '2.0 KiB')
    """
    return size_text(amount) if unit == "bytes" else f"{amount:.4g}"


def table(rows: Sequence[Sequence[str]], left: Iterable[str] = ()) -> str:
    """Rows as a table: columns align to the right, and those named in ``left`` to the left.

    The first row has the names. A column that is empty below its name is left out.

    >>> print(table([["stage", "layers", "peak"], ["0", "a, b", ""], ["12", "c", ""]], ["layers"]))
    stage  layers
        0  a, b
       12  c
    """
    texts = set(left)
    columns = [column for column in zip(*rows, strict=True) if any(column[1:]) or len(column) == 1]
    padded = [
        [(str.ljust if column[0] in texts else str.rjust)(cell, width) for cell in column]
        for column in columns
        for width in [max(map(len, column))]
    ]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*padded, strict=True))
