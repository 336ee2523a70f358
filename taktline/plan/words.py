"""Numbers in sentences."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """A number with its noun in the right form.

    >>> counted(1, "stage"), counted(1200, "micro-batch")
    ('1 stage', '1,200 micro-batches')
    """
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"
