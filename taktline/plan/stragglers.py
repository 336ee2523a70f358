"""Finds slow ranks in measured timelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from taktline.checks import require_instance, require_instances, require_number
from taktline.errors import PlanError
from taktline.plan.action import Kind
from taktline.plan.costs import Costs
from taktline.plan.plan import Plan
from taktline.plan.rows import FloatArray, known_medians
from taktline.plan.timeline import Timeline

_LEAST = 0.01
"""The least that a straggler costs, as a share of the step; less is noise."""
_SHOWN = 3
"""How many micro-batches are named."""
_WORDS = {Kind.F: "forward", Kind.B: "backward"}
_PARTS = {Kind.F: (Kind.F,), Kind.B: (Kind.B, Kind.I, Kind.W)}
"""The halves of a backward count together: where nothing can be split, one has all the work."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A stage whose forward or backward is slow on its rank.

    >>> print(Straggler(2, 5, Kind.F, 31.0, 1.8, (3, 0), "ms", "its work accounts for"))
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
    basis: str = "was expected"

    def __str__(self) -> str:
        what = f"the {_WORDS[self.kind]} of stage {self.stage}"
        time = f"{self.duration:.3g} {self.unit}".rstrip()
        return (
            f"rank {self.rank} is slow: {what} takes {time}, {self.factor:.1f} times what "
            f"{self.basis}; slowest in micro-batches {', '.join(map(str, self.microbatches))}"
        )


def stragglers(
    timelines: Sequence[Timeline], *, work: Costs | None = None, factor: float = 1.3
) -> list[Straggler]:
    """Stages that take at least ``factor`` times as long as expected, the worst first.

    With ``work``, the stages' work in any unit, each stage is compared with the pace of the other
    ranks. Without it, stages may differ in their work, so the last timeline is compared with the
    ones before.

    >>> from taktline.plan import build, simulate
    >>> plan = build("1f1b", ranks=3, microbatches=4)
    >>> slow = simulate(plan, Costs(forward=(1.0, 1.0, 2.0), unit="ms"))
    >>> print(*stragglers([slow], work=Costs()))
    rank 2 is slow: the forward of stage 2 takes 2 ms, 2.0 times what its work accounts for; ...
    """
    timelines = require_instances("timelines", timelines, Timeline)
    factor = require_number("factor", factor, least=1)
    if work is not None:
        require_instance("work", work, Costs)
    if not timelines:
        return []
    plan, unit = timelines[-1].plan, timelines[-1].costs.unit
    if any(timeline.plan.placement != plan.placement for timeline in timelines):
        raise PlanError("stragglers are found in timelines with the same stages on the same ranks")
    latest = timelines if work is not None else timelines[-1:]
    step = float(np.median([timeline.makespan for timeline in latest]))
    found: list[Straggler] = []
    for kind in (Kind.F, Kind.B):
        spent = _medians(latest, kind, plan.stages)
        if work is None:
            expected, basis = _medians(timelines[:-1], kind, plan.stages), "it took before"
        else:
            expected, basis = _by_work(plan, work, kind, spent), "its work accounts for"
        with np.errstate(divide="ignore", invalid="ignore"):
            times = spent / expected
            lost = (spent - expected) * plan.microbatches
            slow = np.isfinite(times) & (times >= factor) & (lost >= _LEAST * step)
        found += [
            Straggler(
                plan.placement.rank_of[stage],
                stage,
                kind,
                float(spent[stage]),
                float(times[stage]),
                _slowest(latest[-1], kind, stage),
                unit,
                basis,
            )
            for stage in np.flatnonzero(slow).tolist()
        ]
    return sorted(found, key=lambda straggler: -straggler.factor)


def _by_work(plan: Plan, work: Costs, kind: Kind, spent: FloatArray) -> FloatArray:
    """The time of each stage at the pace of the other ranks, in the median of their stages."""
    amount = work.of("forward" if kind is Kind.F else "backward", plan.stages)
    rank = np.array(plan.placement.rank_of)
    with np.errstate(divide="ignore", invalid="ignore"):
        pace = np.where(amount > 0, spent / amount, np.nan)
    expected = np.full(plan.stages, np.nan)
    for stage in range(plan.stages):
        others = pace[(rank != rank[stage]) & ~np.isnan(pace)]
        if len(others):
            expected[stage] = amount[stage] * np.median(others)
    return expected


def _medians(timelines: Sequence[Timeline], kind: Kind, stages: int) -> FloatArray:
    """For each stage the median over all micro-batches, or nan."""
    tables = [timeline.durations(*_PARTS[kind]) for timeline in timelines]
    return known_medians(np.hstack([np.full((stages, 1), np.nan), *tables]), axis=1)


def _slowest(timeline: Timeline, kind: Kind, stage: int) -> tuple[int, ...]:
    times = timeline.durations(*_PARTS[kind])[stage]
    order = np.argsort(-times, kind="stable")[:_SHOWN]  # nan comes last
    return tuple(order[~np.isnan(times[order])].tolist())
