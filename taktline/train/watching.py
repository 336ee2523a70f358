"""What a pipeline shows of itself: where it runs, how training goes, its plan and its stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import escape
from typing import TypeVar

from taktline.checks import require_whole
from taktline.plan import Plan
from taktline.runtime import Trace
from taktline.train.boundaries import Boundaries
from taktline.train.live import Live
from taktline.train.progress import progress

__all__ = ["Watching"]

T = TypeVar("T")


class Watching(Live):
    """The methods of a pipeline for people who watch it."""

    @property
    def plan(self) -> Plan:
        """What each rank does, in order."""
        return self._built.plan

    @property
    def boundaries(self) -> Boundaries:
        """What goes from each stage to the next one for the example; print it."""
        return self._built.table.boundaries

    @property
    def is_first(self) -> bool:
        """Whether this process is the one to print, and to save what was gathered."""
        return 0 in self._ranks.own and self._ranks.is_first

    @property
    def replica(self) -> int:
        """Which of the replicas of the pipeline this one is, from 0 up."""
        return self._ranks.replica

    @property
    def replicas(self) -> int:
        """How many replicas of the pipeline there are, each on data of its own."""
        return self._ranks.replicas

    def progress(self, batches: Iterable[T], *, every: int = 10) -> Iterator[T]:
        """The same batches, while the first rank shows how training goes.

        On a terminal that is a bar (with rich), elsewhere a line: loss, tokens or rows a second,
        the bubble, and this process's peak memory. Every rank iterates.

        Args:
            batches: a list, a ``DataLoader``, or :meth:`loader` of one.
            every: after so many steps the numbers are read, and where ranks are processes, one
                step of these is traced to measure the bubble.

        >>> import torch, taktline as tl
        >>> from torch import nn
        >>> pipe = tl.Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, ranks=2)
        >>> for x in pipe.progress([torch.ones(4, 2)] * 3, every=5):  # doctest: +ELLIPSIS
        ...     output = pipe.eval(x)
        step    3  peak ...
        """
        require_whole("every", every, least=1)
        apart = not self._ranks.in_one_process
        return progress(self, batches, every, measured=apart)

    def metrics(self) -> dict[str, float]:
        """Numbers for a log: the same names each time, as far as they are known.

        ``step``, ``loss`` (of the latest step), ``step_ms``, ``rows_per_s`` and ``tokens_per_s``
        (of all replicas, over the last 20 steps), ``bubble`` (of the latest step that
        :meth:`progress` has measured), ``peak_memory`` (bytes of this process).

        >>> import torch, taktline as tl
        >>> from torch import nn
        >>> pipe = tl.Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, ranks=2)
        >>> sorted(pipe.metrics())
        ['peak_memory', 'step']
        """
        return self._metrics.read(self._built.schedule.steps, self.replicas, self.device)

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Note what runs when inside of the block, on every rank; see :meth:`Schedule.trace`."""
        with self._built.schedule.trace() as trace:
            trace.work = self._built.table.work
            yield trace

    def __repr__(self) -> str:
        if self._live is None:
            return "Pipeline(closed)"
        return (
            f"Pipeline({self.plan.name} on {self._ranks}: {self.plan.stages} stages, "
            f"{self.plan.microbatches} micro-batches, {self.device})"
        )

    def _repr_html_(self) -> str:
        drawing = None if self._live is None else self._live.table.predicted()._repr_svg_()
        return f"<pre>{escape(str(self))}</pre>{drawing or ''}"

    def __str__(self) -> str:
        if self._live is None:
            return repr(self)
        live = self._live
        parts = (repr(self), live.table, live.cutting, live.schedule._runner.captured)
        return "\n".join(filter(None, map(str, parts)))
