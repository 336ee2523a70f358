"""Numbers in sentences."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["by_rank", "counted"]


def counted(number: int, noun: str) -> str:
    """A number with its noun in the right form.

    >>> counted(1, "stage"), counted(1200, "micro-batch")
    ('1 stage', '1,200 micro-batches')
    """
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def by_rank(values: Sequence[object]) -> str:
    """What each rank has, ranks with the same together.

    >>> by_rank([8, 4, 4])
    '8 on rank 0; 4 on rank 1, 2'
    """
    return "; ".join(
        f"{value} on rank {', '.join(str(r) for r, v in enumerate(values) if v == value)}"
        for value in dict.fromkeys(values)
    )
