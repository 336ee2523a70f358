"""Traces every n-th step, and logs which ranks were slow in it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from taktline.plan import Timeline, stragglers
from taktline.train.build import Built

__all__ = ["StragglerReport"]

_log = logging.getLogger("taktline")
_REMEMBERED = 8
"""With how many earlier steps one is compared, where the stages' work is not known."""


class StragglerReport:
    """Traces every n-th step, and writes to the log what was slow in it."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._timelines: deque[Timeline] = deque(maxlen=_REMEMBERED + 1)

    @contextmanager
    def step(self, built: Built) -> Iterator[None]:
        """Around a training step; all ranks take part."""
        number = built.schedule.steps
        traced = built.schedule._runner.recorder is not None
        if traced or (number + 1) % self.every:
            yield
            return
        with built.schedule.trace() as trace:
            yield
        self._timelines.extend(trace.timelines)
        if 0 in built.ranks.own:
            self._tell(built, number)

    def _tell(self, built: Built, number: int) -> None:
        work, ranks = built.table.work, built.ranks
        judged = list(self._timelines) if work is None else [self._timelines[-1]]
        where = f"replica {ranks.replica}, " if ranks.replicas > 1 else ""
        for straggler in stragglers(judged, work=work):
            _log.warning("%sstep %d: %s", where, number, straggler)
