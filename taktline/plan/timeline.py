"""When each action started and ended: the result of a simulation, or of a measurement."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from taktline.checks import (
    refuse,
    require_flag,
    require_instance,
    require_instances,
    require_one_of,
)
from taktline.errors import PlanError
from taktline.plan.action import Action, Kind
from taktline.plan.costs import Costs
from taktline.plan.deps import needs
from taktline.plan.lazy_import import lazy_import
from taktline.plan.memory import peak_memory
from taktline.plan.plan import Plan
from taktline.plan.rows import FloatArray, IntArray, as_numbers
from taktline.plan.validate import require_valid
from taktline.text import counted

By: TypeAlias = Literal["makespan", "span"]


@dataclass(frozen=True, slots=True)
class Span:
    """One action and when it ran.

    >>> from taktline.plan import build, simulate
    >>> print(*simulate(build("gpipe", ranks=1, microbatches=1)).spans(0), sep=", ")
    rank 0: 0F0 0 – 1, rank 0: 0B0 1 – 3
    """

    rank: int
    action: Action
    start: float
    end: float

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.action} {self.start:g} – {self.end:g}"


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """When each row of a plan started and ended.

    >>> from taktline.plan import build, simulate
    >>> timeline = simulate(build("gpipe", ranks=4, microbatches=8))
    >>> timeline
    Timeline(gpipe, 4 ranks × 1 stage, 8 micro-batches, makespan 33, bubble 27.3%)
    """

    plan: Plan
    start: FloatArray
    end: FloatArray
    costs: Costs = field(default_factory=Costs)
    arrival: FloatArray | None = None
    """When each row's result arrived at the actions that wait for it; by default at its end."""
    measured: bool = False
    """Whether these times were measured; then ``costs`` are those that they show."""

    def __post_init__(self) -> None:
        require_valid(require_instance("plan", self.plan, Plan))
        require_instance("costs", self.costs, Costs)
        require_flag("measured", self.measured)
        for name in ("start", "end", "arrival"):
            column = getattr(self, name)
            if name != "arrival" or column is not None:
                object.__setattr__(self, name, _checked(name, column, len(self.plan.rows)))

    @property
    def name(self) -> str:
        """The name in drawings and tables."""
        return f"{self.plan.name}, measured" if self.measured else self.plan.name

    @property
    def arrivals(self) -> FloatArray:
        """When each row's result arrived at the actions that wait for it."""
        return self.end if self.arrival is None else self.arrival

    @property
    def makespan(self) -> float:
        """The end of the last action, counted from time 0."""
        return float(self.end.max(initial=0.0))

    @property
    def rank_spans(self) -> FloatArray:
        """For each rank, the time from its first start to its last end."""
        return np.array(
            [
                float(self.end[mine].max() - self.start[mine].min()) if mine.size else 0.0
                for mine in self._compute_by_rank()
            ]
        )

    @property
    def busy(self) -> FloatArray:
        """For each rank, the time in which it computes."""
        lasting = (self.end - self.start) * ~self.plan.rows.second_of_pair()
        return np.array([lasting[mine].sum() for mine in self._compute_by_rank()])

    @property
    def utilisation(self) -> FloatArray:
        """For each rank, the share of the makespan in which it computes."""
        return self.busy / self.makespan if self.makespan else np.zeros(self.plan.ranks)

    @property
    def peak_memory(self) -> FloatArray:
        """For each rank, the peak memory of its activations."""
        return peak_memory(self.plan, self.costs)

    def cost(self, by: By = "makespan") -> float:
        """How long the step takes: the makespan, or the longest rank's own span.

        The span leaves out the waits before a rank's first and after its last action, which the
        next step can fill where no barrier separates two steps.
        """
        require_one_of("by", by, get_args(By), PlanError)
        return self.makespan if by == "makespan" else float(self.rank_spans.max(initial=0.0))

    def bubble(self, by: By = "makespan") -> float:
        """The share of that cost in which an average rank is idle."""
        cost = self.cost(by)
        return self.idle(by) / cost if cost else 0.0

    def idle(self, by: By = "makespan") -> float:
        """The time of that cost in which an average rank is idle."""
        return self.cost(by) - float(self.busy.mean())

    def durations(self, *kinds: Kind) -> FloatArray:
        """How long each stage took for each micro-batch, actions of several kinds together.

        It is nan where there is none, and for both halves of an overlapped pair.

        >>> from taktline.plan import build, simulate
        >>> simulate(build("1f1b", ranks=2, microbatches=3)).durations(Kind.B)
        array([[2., 2., 2.],
               [2., 2., 2.]])
        """
        rows = self.plan.rows
        at = np.flatnonzero(np.isin(rows.kind, kinds) & ~rows.joined & ~rows.second_of_pair())
        table = np.full((self.plan.stages, self.plan.microbatches), np.nan)
        place = (rows.stage[at], rows.microbatch[at])
        table[place] = 0.0
        np.add.at(table, place, (self.end - self.start)[at])
        return table

    def spans(self, rank: int) -> Iterator[Span]:
        """The actions of a rank, in order; an overlapped pair as two."""
        self.plan.placement.require_rank(rank)
        for row in range(int(self.plan.offsets[rank]), int(self.plan.offsets[rank + 1])):
            yield self._span(rank, row)

    @cached_property
    def held_by(self) -> IntArray:
        """For each row, the row that it waited for last, or -1.

        It is the later one of its rank's previous action and the row whose result it needs. In a
        draw, the previous action counts.
        """
        plan, rows = self.plan, self.plan.rows
        rank, arrives_from = plan.rank_of_rows(), needs(plan).arrival
        row = np.arange(len(rows))
        first = row - rows.second_of_pair()
        previous = np.where(first > plan.offsets[rank], first - 1, -1)
        held_by = previous
        since = np.where(previous >= 0, self.end[previous], -np.inf)
        for half in (first, first + rows.joined[first]):
            source = arrives_from[half]
            there = np.where(rank[source] == rank, self.end[source], self.arrivals[source])
            later = (source >= 0) & (there > since)
            held_by, since = np.where(later, source, held_by), np.where(later, there, since)
        return held_by

    def messages(self) -> tuple[IntArray, IntArray]:
        """The compute rows whose result crosses between ranks, and the rows that wait for it."""
        needed = needs(self.plan)
        targets = np.flatnonzero(needed.waits >= 0)
        sources = needed.waits[targets]
        sends = self.plan.rows.kind[sources] > Kind.W
        return np.where(sends, needed.own[sources], sources), targets

    def critical_path(self) -> list[Span]:
        """The chain of actions, each delayed by the one before, that ends last.

        >>> from taktline.plan import build, simulate
        >>> path = simulate(build("1f1b", ranks=2, microbatches=1)).critical_path()
        >>> " ".join(str(span.action) for span in path)
        '0F0 1F0 1B0 0B0'
        """
        rank = self.plan.rank_of_rows()
        return [self._span(int(rank[row]), row) for row in self.critical_rows()]

    def critical_rows(self) -> list[int]:
        """The rows of :meth:`critical_path`."""
        rows = self.plan.rows
        rank, held_by = self.plan.rank_of_rows(), self.held_by
        path = [len(rows) - 1 - int(np.argmax(self.end[::-1]))]
        while held_by[path[-1]] >= 0:
            path.append(int(held_by[path[-1]]))
        path.reverse()
        return [
            row
            for row, following in zip(path, [*path[1:], path[-1]], strict=True)
            # Otherwise only actions that take time or go to another rank hold others up.
            if rows.kind[row] <= Kind.W
            or self.end[row] > self.start[row]
            or rank[row] != rank[following]
        ]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the timeline to a file in the format of its ending.

        ``.html`` is a page to explore, ``.svg`` a picture, ``.csv`` has a line for each action, and
        ``.json`` is what ``read_timeline`` reads.

        >>> from tempfile import TemporaryDirectory
        >>> from taktline.plan import build, simulate
        >>> with TemporaryDirectory() as folder:
        ...     simulate(build("1f1b", ranks=4, microbatches=8)).save(f"{folder}/step.svg").name
        'step.svg'
        """
        return lazy_import("render").save([self], path)

    def show(self) -> None:
        """Open the page in a browser; without one, print the chart."""
        lazy_import("render").show([self])

    def _repr_svg_(self) -> str | None:
        return lazy_import("render").inline(self)

    def __repr__(self) -> str:
        shape, microbatches = self.plan.placement.shape, self.plan.microbatches
        return (
            f"Timeline({self.name}, {shape}, {counted(microbatches, 'micro-batch')}, "
            f"makespan {f'{self.makespan:.5g} {self.costs.unit}'.strip()}, "
            f"bubble {self.bubble():.1%})"
        )

    def to_svg(self, *, width: float | None = None) -> str:
        """A drawing for papers and pages; see :func:`taktline.render.svg.to_svg`."""
        return lazy_import("render").to_svg([self], width=width)

    def to_html(self, *others: Timeline) -> str:
        """A page to explore, alone or beside others; see :func:`taktline.render.html.to_html`.

        >>> from taktline.plan import build, simulate
        >>> page = simulate(build("1f1b", ranks=4, microbatches=8)).to_html()
        >>> page[:15]
        '<!doctype html>'
        """
        return lazy_import("render").to_html([self, *require_instances("others", others, Timeline)])

    def to_trace(self) -> str:
        """A trace for Perfetto; see :func:`taktline.render.trace.to_trace`."""
        return lazy_import("render").to_trace([self])

    def to_text(self, width: int | None = None, *, colour: bool = False) -> str:
        """A chart for a terminal; see :func:`taktline.render.text.chart`."""
        return lazy_import("render").chart([self], width, colour=colour)

    def _span(self, rank: int, row: int) -> Span:
        return Span(rank, self.plan.rows.leaf(row), float(self.start[row]), float(self.end[row]))

    def _compute_by_rank(self) -> list[IntArray]:
        rows = np.flatnonzero(self.plan.rows.kind <= Kind.W)
        return np.split(rows, np.searchsorted(rows, self.plan.offsets[1:-1]))


def _checked(name: str, column: Any, rows: int) -> FloatArray:
    """One finite number for each row."""
    numbers = as_numbers(column)
    if numbers is None or numbers.shape != (rows,):
        refuse(name, f"an array of {rows:,} numbers, one for each row of the plan", column)
    return numbers.astype(np.float64, copy=False)
