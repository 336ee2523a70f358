"""Methods of a pipeline for people: where it runs, how training goes, its plan and stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import escape
from typing import TypeVar

from taktline.checks import require_whole
from taktline.plan import Plan
from taktline.runtime import Trace
from taktline.train.base import PipelineBase
from taktline.train.metrics import progress
from taktline.train.stage_table import Boundaries

T = TypeVar("T")


class Monitoring(PipelineBase):
    """The methods of a pipeline that report on it."""

    @property
    def plan(self) -> Plan:
        """The plan: what each rank does, in order."""
        return self._built.plan

    @property
    def boundaries(self) -> Boundaries:
        """The tensors that each stage sends to the next one for the example; print it."""
        return self._built.table.boundaries

    @property
    def is_first(self) -> bool:
        """Whether this process is the one to print, and to save a gathered state."""
        return 0 in self._ranks.own and self._ranks.is_first

    @property
    def replica(self) -> int:
        """The number of this replica of the pipeline, from 0 up."""
        return self._ranks.replica

    @property
    def replicas(self) -> int:
        """How many replicas of the pipeline there are, each on data of its own."""
        return self._ranks.replicas

    def progress(self, batches: Iterable[T], *, every: int = 10) -> Iterator[T]:
        """Yields the batches, while the first rank shows how training goes.

        It shows a bar on a terminal (with rich), and lines elsewhere: loss, tokens or rows a
        second, the bubble, and this process's peak memory. Every rank iterates.

        Args:
            batches: a list, a ``DataLoader``, or :meth:`loader` of one.
            every: the numbers are read after so many steps. Where ranks are processes, one of
                these steps is traced to measure the bubble.

        >>> import torch, taktline as tl
        >>> from torch import nn
        >>> pipe = tl.Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, ranks=2)
        >>> for x in pipe.progress([torch.ones(4, 2)] * 3, every=5):  # doctest: +ELLIPSIS
        ...     output = pipe.eval(x)
        step    3  peak ...
        """
        require_whole("every", every, least=1)
        return progress(self, batches, every, measured=not self._ranks.in_one_process)

    def metrics(self) -> dict[str, float]:
        """Numbers for a log, under the same names each time; those that are known.

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
        """Trace the steps inside of the block, on every rank; see :meth:`Schedule.trace`."""
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
        parts = (repr(self), live.table, live.batch_dims, live.schedule._runner.captured)
        return "\n".join(filter(None, map(str, parts)))
