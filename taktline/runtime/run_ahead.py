"""Steps without an exchange: a rank begins the next one while others still compute this one.

::

    waiting      rank 0   F F F F I I W I W I W W         │ F F …
                 rank 1     F F F I F I W I W I W W       │   F …       all ranks end together
                 rank 2       F F I F I F I W I W W W     │     …

    run_ahead    rank 0   F F F F I I W I W I W W F F …
                 rank 1     F F F I F I W I W I W W F …
                 rank 2       F F I F I F I W I W W W …

The ranks know the kind of such a step: every rank gets the whole batch, and its shapes are those of
the latest step, on which the ranks agreed. At the end each rank posts its record and goes on; the
records of a step are read before the next but one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from taktline.runtime.agreement import Record
from taktline.text import by_rank

_log = logging.getLogger("taktline")


class Agreed(NamedTuple):
    """A training step on which the ranks agreed by an exchange."""

    record: Record
    kind: tuple[int, ...]
    rows: int


def repeatable(records: Sequence[Record], rank: int, kind: tuple[int, ...]) -> Agreed | None:
    """The step of these records, if others like it need no exchange; None if they do."""
    first = records[0].whole
    if not first or any(record.whole != first for record in records):
        return None
    return Agreed(records[rank], kind, max(record.batch for record in records))


def warn_of_no_effect(records: Sequence[Record]) -> None:
    """Log why steps are not repeatable."""
    given = ["a batch" if record.whole else "none" for record in records]
    _log.warning(
        "run_ahead has no effect: pass the whole batch, with its target, on every rank; ranks got "
        "%s",
        by_rank(given) if "none" in given else "batches of different shapes",
    )
