"""When each action of a plan runs, simulated or measured, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias, get_args

import numpy as np

from taktline.checks import check, check_list, check_one_of, refuse
from taktline.errors import CostError, PlanError
from taktline.plan.action import COPIES, Action, Kind
from taktline.plan.bound import Bound, lower_bound
from taktline.plan.costs import Costs
from taktline.plan.deps import channels, needs
from taktline.plan.memory import peak_memory
from taktline.plan.passes import add_comm
from taktline.plan.plan import Drawable, Plan, render
from taktline.plan.rows import FloatArray, IntArray, as_numbers, known_medians
from taktline.plan.validate import require_valid
from taktline.plan.walk import walk
from taktline.plan.work import Work
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
class Timeline(Drawable):
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
        require_valid(check("plan", self.plan, Plan))
        check("costs", self.costs, Costs)
        check("measured", self.measured, bool)
        for name in ("start", "end", "arrival"):
            column, count = getattr(self, name), len(self.plan.rows)
            if name == "arrival" and column is None:
                continue
            numbers = as_numbers(column)
            if numbers is None or numbers.shape != (count,):
                refuse(name, f"an array of {count:,} numbers, one for each row of the plan", column)
            object.__setattr__(self, name, numbers.astype(np.float64, copy=False))

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
        mine = [(self.start[rows], self.end[rows]) for rows in self._compute_by_rank()]
        return np.array([end.max() - start.min() if len(end) else 0.0 for start, end in mine])

    @property
    def busy(self) -> FloatArray:
        """For each rank, the time in which it computes; a RECOMPUTE counts as lost."""
        rows = self.plan.rows
        counts = ~rows.second_of_pair() & (rows.kind != Kind.RECOMPUTE)
        lasting = (self.end - self.start) * counts
        return np.array([lasting[rows].sum() for rows in self._compute_by_rank()])

    @property
    def utilisation(self) -> FloatArray:
        """For each rank, the share of the makespan in which it computes."""
        return self.busy / self.makespan if self.makespan else np.zeros(self.plan.ranks)

    @property
    def peak_memory(self) -> FloatArray:
        """For each rank, the peak of its activations, in the ``memory_unit`` of the costs."""
        return peak_memory(self.plan, self.costs)

    def cost(self, by: By = "makespan") -> float:
        """How long the step takes: the makespan, or the longest rank's own span.

        The span leaves out the waits before a rank's first and after its last action, which the
        next step can fill where no barrier separates two steps.
        """
        check_one_of("by", by, get_args(By), error=PlanError)
        return self.makespan if by == "makespan" else float(self.rank_spans.max(initial=0.0))

    def bubble(self, by: By = "makespan") -> float:
        """The share of that cost in which an average rank is idle."""
        cost = self.cost(by)
        return self.idle(by) / cost if cost else 0.0

    def idle(self, by: By = "makespan") -> float:
        """The time of that cost in which an average rank is idle."""
        return self.cost(by) - float(self.busy.mean())

    @cached_property
    def bound(self) -> Bound | None:
        """What no plan can beat at these costs and this peak memory, on the same ranks.

        It is None for plans without backwards, and for measured timelines. With copies or
        RECOMPUTE, it is what no plan can beat in any memory.
        """
        if self.measured or not self.plan.has(Kind.B, Kind.I, Kind.W):
            return None
        most = math.inf if self.plan.saves_memory else float(self.peak_memory.max())
        memory = [most] * self.plan.ranks
        work = Work.of(self.costs, self.plan.placement, self.plan.microbatches, memory)
        return lower_bound(work, self.costs)

    @property
    def verdict(self) -> str:
        """The bubble of the makespan, and that of the bound.

        >>> from taktline.plan import build, simulate
        >>> simulate(build("1f1b", ranks=4, microbatches=8)).verdict
        'bubble 27.3%; no plan at this memory is below 11.1%'
        """
        text = f"bubble {self.bubble():.1%}"
        if self.bound is None:
            return text
        at = "" if self.plan.saves_memory else " at this memory"
        return f"{text}; no plan{at} is below {self.bound.bubble_of_makespan:.1%}"

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
        plan, rows, needed = self.plan, self.plan.rows, needs(self.plan)
        rank, row = plan.rank_of_rows(), np.arange(len(rows))
        first = row - rows.second_of_pair()
        # Copies do not hold their rank, but it may have to wait before it starts one.
        copies = np.isin(rows.kind, COPIES)
        lane = np.maximum.accumulate(np.where(copies, -1, row))
        before = np.where(first > plan.offsets[rank], first - 1, -1)
        previous = np.where(before >= 0, lane[before], -1)
        held_by = previous = np.where(previous >= plan.offsets[rank], previous, -1)
        since = np.where(previous >= 0, self.end[previous], -np.inf)
        halves, columns = (first, first + rows.joined[first]), [needed.arrival]
        if copies.any():
            blocked = np.where((before >= 0) & copies[before], needed.copy[before], -1)
            columns += [needed.copy, blocked, _previous_reload(plan)]
        for source in [column[half] for column in columns for half in halves]:
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
        held_by = self.held_by
        path = [len(held_by) - 1 - int(np.argmax(self.end[::-1]))]
        while held_by[path[-1]] >= 0:
            path.append(int(held_by[path[-1]]))
        rows, following = np.array(path[::-1]), np.array([*path[-2::-1], path[0]])
        # Of the others, only actions that take time or go to another rank hold any up.
        rank, computes = self.plan.rank_of_rows(), self.plan.rows.kind[rows] <= Kind.W
        matters = computes | (self.end > self.start)[rows] | (rank[rows] != rank[following])
        return rows[matters].tolist()

    def __repr__(self) -> str:
        shape, microbatches = self.plan.placement.shape, self.plan.microbatches
        return (
            f"Timeline({self.name}, {shape}, {counted(microbatches, 'micro-batch')}, "
            f"makespan {f'{self.makespan:.5g} {self.costs.unit}'.strip()}, "
            f"bubble {self.bubble():.1%})"
        )

    def to_svg(self, *, width: float | None = None) -> str:
        """A drawing for papers and pages; see :func:`taktline.render.svg.to_svg`."""
        return render().to_svg([self], width=width)

    def to_html(self, *others: Timeline) -> str:
        """A page to explore, alone or beside others; see :func:`taktline.render.html.to_html`."""
        return render().to_html([self, *check_list("others", others, Timeline)])

    def to_trace(self) -> str:
        """A trace for Perfetto; see :func:`taktline.render.trace.to_trace`."""
        return render().to_trace([self])

    def to_text(self, width: int | None = None, *, colour: bool = False) -> str:
        """A chart for a terminal; see :func:`taktline.render.text.chart`."""
        return render().chart([self], width, colour=colour)

    def _span(self, rank: int, row: int) -> Span:
        return Span(rank, self.plan.rows.leaf(row), float(self.start[row]), float(self.end[row]))

    def _compute_by_rank(self) -> list[IntArray]:
        rows = np.flatnonzero(self.plan.rows.kind <= Kind.W)
        return np.split(rows, np.searchsorted(rows, self.plan.offsets[1:-1]))


def simulate(plan: Plan, costs: Costs | None = None) -> Timeline:
    """Simulate a plan: every action runs as early as its rank and its dependencies allow.

    If messages keep their sender busy, or those of overlapped pairs queue, the timeline is that of
    the lowered plan.

    >>> from taktline.plan import build
    >>> timeline = simulate(build("1f1b", ranks=4, microbatches=8), Costs(forward=1.0))
    >>> timeline.makespan
    33.0
    """
    costs = Costs() if costs is None else check("costs", costs, Costs)
    require_valid(plan)
    sent, flight = costs.messages(plan.placement)
    # Both halves of a pair end at once, so where their messages queue is seen in the lowered plan.
    if costs.comm_blocks or (sent.any() and plan.rows.joined.any()):
        plan = add_comm(plan)
    duration, waits = costs.durations(plan), needs(plan).waits
    if not (sent.any() or flight.any() or plan.has(*COPIES)):
        start = walk(plan, waits, duration).start
        return Timeline(plan, start, start + duration, costs)
    rows, channel = plan.rows, channels(plan)
    letter = (np.isin(rows.kind, (Kind.B, Kind.I, Kind.SEND_B)).astype(np.int8), rows.stage)
    occupies, delay = (np.where(channel >= 0, table[letter], 0.0) for table in (sent, flight))
    if costs.comm_blocks:
        duration += occupies + delay
        occupies, delay = np.zeros(len(rows)), 0.0
    if not plan.has(*COPIES):
        run = walk(plan, waits, duration, channel=channel, occupies=occupies, delay=delay)
        return Timeline(plan, run.start, run.start + duration, costs, run.arrival)
    copies = np.isin(rows.kind, COPIES)
    engine = channel.max(initial=0) + 1 + plan.rank_of_rows() * 2 + (rows.kind == Kind.RELOAD)
    channel, occupies = np.where(copies, engine, channel), np.where(copies, duration, occupies)
    run = walk(
        plan,
        waits,
        np.where(copies, 0.0, duration),
        channel=channel,
        occupies=occupies,
        delay=delay,
        copy=needs(plan).copy,
    )
    start = np.where(copies, run.arrival - duration, run.start)
    end = np.where(copies, run.arrival, run.start + duration)
    return Timeline(plan, start, end, costs, run.arrival)


def _previous_reload(plan: Plan) -> IntArray:
    """For each RELOAD the one before on its rank, or -1; they share an engine."""
    previous, rank = np.full(len(plan.rows), -1), plan.rank_of_rows()
    at = np.flatnonzero(plan.rows.kind == Kind.RELOAD)
    previous[at[1:]] = np.where(rank[at[1:]] == rank[at[:-1]], at[:-1], -1)
    return previous


_LEAST = 0.01
"""The least that a straggler costs, as a share of the step; less is noise."""
_PARTS = {
    Kind.F: ("forward", (Kind.F,)),
    Kind.B: ("backward", (Kind.B, Kind.I, Kind.W)),
}
"""The halves of a backward count together: where nothing can be split, one has all the work."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A stage whose forward or backward is slow on its rank.

    >>> print(Straggler(2, 5, Kind.F, 31.0, 1.8, (3, 0), "ms"))
    rank 2 is slow: the forward of stage 5 takes 31 ms, 1.8 times what its work accounts for; ...
    """

    rank: int
    stage: int
    kind: Kind
    """F, or B for a backward, whole or in halves."""
    duration: float
    """The median over its micro-batches."""
    factor: float
    """The duration, divided by the expected one."""
    microbatches: tuple[int, ...]
    """Those that took longest, the slowest first."""
    unit: str = ""

    def __str__(self) -> str:
        what = "forward" if self.kind is Kind.F else "backward"
        time = f"{self.duration:.3g} {self.unit}".rstrip()
        return (
            f"rank {self.rank} is slow: the {what} of stage {self.stage} takes {time}, "
            f"{self.factor:.1f} times what its work accounts for; slowest in micro-batches "
            f"{', '.join(map(str, self.microbatches))}"
        )


def stragglers(
    timelines: Sequence[Timeline], *, work: Costs | None, factor: float = 1.3
) -> list[Straggler]:
    """Stages that take at least ``factor`` times as long as expected, the worst first.

    Each stage is compared with the pace of the other ranks: the time that they take for their
    ``work``, which is in any unit.

    >>> from taktline.plan import build, simulate
    >>> plan = build("1f1b", ranks=3, microbatches=4)
    >>> slow = simulate(plan, Costs(forward=(1.0, 1.0, 2.0), unit="ms"))
    >>> print(*stragglers([slow], work=Costs()))
    rank 2 is slow: the forward of stage 2 takes 2 ms, 2.0 times what its work accounts for; ...
    """
    timelines = check_list("timelines", timelines, Timeline)
    factor = check("factor", factor, float, least=1)
    if work is None:
        raise CostError(
            "the work of the stages is not known: pass it as work=, or give the Pipeline an "
            "example, by which it counts it"
        )
    check("work", work, Costs)
    if not timelines:
        return []
    plan, unit = timelines[-1].plan, timelines[-1].costs.unit
    if any(timeline.plan.placement != plan.placement for timeline in timelines):
        raise PlanError("stragglers are found in timelines with the same stages on the same ranks")
    least = _LEAST * float(np.median([timeline.makespan for timeline in timelines]))
    found: list[Straggler] = []
    rank = np.array(plan.placement.rank_of)
    for kind, (name, kinds) in _PARTS.items():
        spent = known_medians(np.hstack([each.durations(*kinds) for each in timelines]), axis=1)
        amount = work.of(name, plan.stages)
        pace = np.divide(spent, amount, out=np.full_like(spent, np.nan), where=amount > 0)
        others = np.where(rank[:, None] != rank, pace, np.nan)
        expected = amount * known_medians(others, axis=1)
        lost = (spent - expected) * plan.microbatches
        slow = (expected > 0) & (spent >= factor * expected) & (lost >= least)
        took = timelines[-1].durations(*kinds)
        for at in np.flatnonzero(slow).tolist():
            slowest = np.argsort(-took[at], kind="stable")[:3].tolist()
            known = tuple(number for number in slowest if not np.isnan(took[at, number]))
            facts = (float(spent[at]), float(spent[at] / expected[at]), known, unit)
            found.append(Straggler(int(rank[at]), at, kind, *facts))
    return sorted(found, key=lambda straggler: -straggler.factor)
