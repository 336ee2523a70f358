"""Makes a plan fit into less memory: what to copy to the host, what to compute again, and when.

Memory follows from the order of actions, so a plan that fits does so whatever its times are; times
only decide which way is quickest. Each rank is tried in several ways, at the times of the plan and
then at those of the best result, and whole plans are compared by simulation.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple, TypeAlias, get_args

import numpy as np

from taktline.checks import check, check_one_of, refuse
from taktline.errors import CostError, PlanError, ScheduleError
from taktline.plan.action import Kind
from taktline.plan.costs import Costs
from taktline.plan.deps import GRADIENT, Where
from taktline.plan.memory import memory_curve, peak_memory
from taktline.plan.plan import Level, Plan
from taktline.plan.rows import FloatArray, Rows, as_numbers
from taktline.plan.timeline import By, Timeline, simulate
from taktline.plan.validate import require_valid
from taktline.plan.work import MARGIN
from taktline.text import counted

Memory: TypeAlias = float | Sequence[float]
_ROUNDS = 3


def fit_memory(
    plan: Plan, costs: Costs, memory: Memory, *, host: Memory | None = None, by: By = "span"
) -> Plan:
    """The plan with OFFLOAD, RELOAD and RECOMPUTE, so that each rank keeps within its memory.

    What lives longest is copied first, and back early enough where this hides the copies. What
    they cannot save in time is recomputed, or waited for, whatever makes ``by`` shorter. Only
    what the costs name is used: copies with ``offload``, recomputation with ``recompute``.
    ``memory`` and ``host`` are in ``costs.memory_unit``, one number or one for each rank.

    >>> from taktline.plan import build
    >>> plan, costs = build("1f1b", ranks=4, microbatches=8), Costs(offload=1.0)
    >>> fitted = fit_memory(plan, costs, memory=2)
    >>> peak_memory(fitted, costs)
    array([2., 2., 2., 1.])
    >>> simulate(plan).makespan, simulate(fitted, costs).makespan
    (33.0, 33.0)
    """
    check("plan", plan, Plan)
    check("costs", costs, Costs, error=CostError)
    check_one_of("by", by, get_args(By), error=PlanError)
    limits = limits_of("memory", memory, plan.ranks)
    hosts = limits_of("host", math.inf if host is None else host, plan.ranks)
    require_valid(plan)
    if plan.level != Level.COMPUTE or plan.saves_memory:
        raise PlanError(
            "fit_memory needs a COMPUTE plan without OFFLOAD and RECOMPUTE; apply it first"
        )
    if (peak_memory(plan, costs) <= limits * (1 + MARGIN)).all():
        return plan
    if not costs.saves_memory:
        raise CostError(
            f"plan {plan.name!r} needs more memory, and the costs do not say what saves it: pass "
            "offload, the time of a copy to the host, or recompute, that of a forward again"
        )
    timeline, found = simulate(plan, costs), list[tuple[tuple[float, float], int, Plan]]()
    for _ in range(_ROUNDS):
        for fitted in _fitted(plan, timeline, costs, limits, hosts):
            if all(fitted != other for *_, other in found):
                times = simulate(fitted, costs)
                score = (times.cost(by), times.makespan)
                found.append((score, len(fitted.rows), fitted))
        best = min(found, key=lambda each: each[:2])[2]
        timeline = simulate(best, costs)
    return min(found, key=lambda each: each[:2])[2]


def least_memory(plan: Plan, costs: Costs) -> FloatArray:
    """The least that :func:`fit_memory` can do with on each rank.

    >>> from taktline.plan import build
    >>> least_memory(build("gpipe", ranks=2, microbatches=8), Costs(offload=1.0))
    array([2., 2.])
    """
    ranks = _ranks(plan, simulate(plan, costs), costs, [math.inf] * plan.ranks)
    return np.minimum(peak_memory(plan, costs), [rank.least(costs).peak for rank in ranks])


def limits_of(name: str, given: Memory, ranks: int) -> FloatArray:
    """A number for each rank, from one for all or one for each."""
    unlimited = isinstance(given, float) and given == math.inf
    limits = np.array(given) if unlimited else as_numbers(given)
    if limits is None or limits.ndim > 1 or (limits < 0).any():
        refuse(name, "a number from 0 up, or one for each rank", given, ScheduleError)
    if limits.ndim and len(limits) != ranks:
        raise ScheduleError(
            f"{name} is for {counted(len(limits), 'rank')}, but there are {ranks}; pass "
            "one number for all, or one for each"
        )
    return np.broadcast_to(limits, ranks).astype(float)


class _Choice(NamedTuple):
    """What becomes of a rank's activations."""

    copies: dict[int, tuple[int, int]]
    """Of some, before which steps their OFFLOAD and RELOAD are."""
    again: list[int]
    """Those that are recomputed."""
    peak: float


def _ranks(plan: Plan, timeline: Timeline, costs: Costs, hosts: Sequence[float]) -> Iterator[_Rank]:
    during, where = memory_curve(plan, costs)[0], Where(plan)
    for rank, host in enumerate(hosts):
        yield _Rank(plan, rank, timeline, costs, during, where, host)


class _Rank:
    """A rank's steps, an overlapped pair being one, and its activations, a number each."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        timeline: Timeline,
        costs: Costs,
        during: FloatArray,
        where: Where,
        host: float,
    ) -> None:
        self.rows, self.host = plan.rows_of(rank), host
        rows = self.rows
        steps, offset = ~rows.second_of_pair(), int(plan.offsets[rank])
        self.first = np.flatnonzero(steps)
        """The first row of each step."""
        self.level = np.maximum.reduceat(during[offset : offset + len(rows)], self.first)
        timed = timeline.plan.rows
        runs = (timed.kind <= Kind.W) & (timed.kind != Kind.RECOMPUTE)
        runs &= timeline.plan.rank_of_rows() == rank
        self.start, self.end = (x[runs][self.first] for x in (timeline.start, timeline.end))
        step_of, at = np.cumsum(steps) - 1, np.flatnonzero(rows.kind == Kind.F)
        self.stage, self.microbatch = stage, number = rows.stage[at], rows.microbatch[at]
        self.made, self.used = step_of[at], step_of[where.rows(GRADIENT, stage, number) - offset]
        """The steps of F, and of B or I."""
        parts = ("activation", "offloadable", "kept_for_recompute")
        whole, self.moved, kept = (costs.keeps(plan.placement, part)[stage] for part in parts)
        self.less = whole - kept
        """What recomputation saves; ``moved`` is what an OFFLOAD does."""
        names = ("offload", "reload", "recompute")
        self.offload, self.reload, self.recompute = (
            costs.of(name, plan.stages)[stage] for name in names
        )

    def choose(self, limit: float, pace: float | None, every: bool, again: bool) -> _Choice:
        """Copies with engines that take ``pace`` of their time, and then what is recomputed.

        At a pace of 1 they are hidden; at 0, the rank waits for each. None: there are no copies.
        """
        made, used, slow = self.made, self.used, pace or 0.0
        picked = self._within_host(range(len(made)) if every else ())
        repeated, free = list[int](), (self.moved > 0) & (pace is not None)
        free[picked] = False
        begin = self.end[made] + slow * self.offload
        until = self.start[used] - slow * self.reload
        longest = np.argsort(begin - until, kind="stable")
        cost = self.recompute - (self.start[used] - np.append(0.0, self.end)[used])
        # What fits into idle time is free; the longest of these first.
        order = np.lexsort((made - used, np.maximum(cost, 0.0) / np.maximum(self.less, 1e-300)))
        while True:
            copies = self._placed(picked, slow)
            level = self._level(copies, repeated)
            over, more, left = np.flatnonzero(level > limit).tolist(), list[int](), level.copy()
            for step in over if not repeated else ():
                away = free & (made + 1 < step) & (step < used)
                away &= (begin <= self.start[step]) & (self.end[step] <= until)
                found = longest[away[longest]]
                before = np.cumsum(self.moved[found]) - self.moved[found]
                for life in found[before < left[step] - limit].tolist():
                    left[step : used[life]] -= self.moved[life]
                    free[life] = False
                    more.append(life)
            picked = self._within_host([*picked, *more]) if more else picked
            if over and again and not more:
                spans = (made <= over[0]) & (over[0] < used) & (self.less > 0)
                spans[repeated] = False
                more = order[spans[order]][:1].tolist()
                repeated = repeated + more
                picked = [life for life in picked if life not in more]
            if not more:
                return _Choice(copies, repeated, float(level.max()))

    def least(self, costs: Costs) -> _Choice:
        """What saves most: all copied, all recomputed, or for each stage what saves more of it."""
        copies, again, found = (
            costs.offload is not None,
            costs.recompute is not None,
            list[_Choice](),
        )
        every = list(range(len(self.made)))
        smaller = [life for life in every if self.moved[life] > self.less[life]]
        for picked in ([every] * copies) + [[]] * again + [smaller] * (copies and again):
            placed = self._placed(self._within_host(picked), 0.0)
            rest = [life for life in every if again and life not in placed]
            repeated = rest if self.less.any() and picked != every else []
            found.append(_Choice(placed, repeated, float(self._level(placed, repeated).max())))
        return min(found, key=lambda choice: choice.peak)

    def _within_host(self, picked: Iterable[int]) -> list[int]:
        """As many of these as the host can hold, those first that live longest."""
        kept, host = list[int](), np.zeros(len(self.level))
        for life in sorted(picked, key=lambda life: self.made[life] - self.used[life]):
            held = slice(int(self.made[life]) + 1, int(self.used[life]) + 1)
            if host[held].max() + self.moved[life] <= self.host:
                host[held] += self.moved[life]
                kept.append(life)
        return kept

    def _placed(self, picked: Iterable[int], pace: float) -> dict[int, tuple[int, int]]:
        """Before which steps to copy: to the host as early as possible, and back as late.

        An activation for which this leaves no time stays.
        """
        start, end, soonest = self.start.tolist(), self.end.tolist(), math.inf
        picked, back = sorted(picked, key=lambda life: int(self.made[life])), dict[int, int]()
        for life in sorted(picked, key=lambda life: -int(self.used[life])):
            used = int(self.used[life])
            begin = min(start[used], soonest) - pace * float(self.reload[life])
            step = min(bisect_right(end, begin + _LITTLE * abs(begin)), used)
            if step >= self.made[life] + 2:
                back[life], soonest = step, begin
        reloads, copies, ends = sorted(back.values()), dict[int, tuple[int, int]](), -math.inf
        waiting = [life for life in picked if life in back][::-1]
        for step in range(1, len(end)):
            while waiting and back[waiting[-1]] <= step:
                waiting.pop()
            if not waiting or self.made[waiting[-1]] >= step:
                continue
            begin = max(end[step - 1], ends)
            over = begin + pace * float(self.offload[waiting[-1]])
            following = start[reloads[bisect_right(reloads, step)]]
            # The rank's next copy waits for this one, as this one has waited for the last.
            if begin <= start[step] + _LITTLE * begin and over <= following + _LITTLE * over:
                life, ends = waiting.pop(), over
                copies[life] = step, back[life]
        return copies

    def _level(self, copies: dict[int, tuple[int, int]], again: Iterable[int]) -> FloatArray:
        """The memory at each step."""
        level = self.level.copy()
        steps = sorted({step for both in copies.values() for step in both})
        for life, (out, back) in copies.items():
            level[steps[bisect_left(steps, out) + 1] : back] -= self.moved[life]
        for life in again:
            level[self.made[life] : self.used[life]] -= self.less[life]
        return level

    def with_actions(self, choice: _Choice) -> Rows:
        """The rank's rows with those of a choice. At a step, RELOADs are before OFFLOADs."""
        rows = [(int(self.used[life]), 2, 0, Kind.RECOMPUTE, life) for life in choice.again]
        for life, (out, back) in choice.copies.items():
            rows.append((out, 1, int(self.made[life]), Kind.OFFLOAD, life))
            rows.append((back, 0, int(self.used[life]), Kind.RELOAD, life))
        if not rows:
            return self.rows
        step, _, _, kind, life = np.array(sorted(rows)).T
        new = Rows.of(kind, self.stage[life], self.microbatch[life])
        anchor = np.concatenate([self.first[step], np.arange(len(self.rows))])
        return Rows.concatenate([new, self.rows])[np.argsort(anchor, kind="stable")]


_LITTLE = 1e-9
_PACES = (1.0, 0.85, 0.7, 0.5, 0.25, 0.0)
_WAYS = [*product(_PACES, (False, True), (False, True)), (None, False, True)]
"""The pace of copies, if there are any; whether all is copied; whether the rest is recomputed."""


def _fitted(
    plan: Plan, timeline: Timeline, costs: Costs, limits: FloatArray, hosts: FloatArray
) -> Iterator[Plan]:
    """The plan in several ways, each within the memory; an error if there is none."""
    ways = [
        (pace, every, again)
        for pace, every, again in _WAYS
        if (pace is None or costs.offload is not None)
        and (costs.recompute is not None or not again)
    ]
    options, short, most = list[list[Rows]](), list[str](), limits * (1 + MARGIN)
    peaks = peak_memory(plan, costs)
    for rank, subject in enumerate(_ranks(plan, timeline, costs, hosts.tolist())):
        limit = float(most[rank])
        if peaks[rank] <= limit:
            options.append([subject.rows] * len(ways))
            continue
        least, choices = subject.least(costs), [subject.choose(limit, *way) for way in ways]
        fits = [choice if choice.peak <= limit else least for choice in choices]
        if min(choice.peak for choice in fits) > limit:
            short.append(f"rank {rank} needs at least {least.peak:.10g}, not {limits[rank]:g}")
        options.append([subject.with_actions(choice) for choice in fits])
    if short:
        raise ScheduleError(f"plan {plan.name!r} does not fit into the memory: {'; '.join(short)}")
    for by_rank in zip(*options, strict=True):
        yield plan.with_rows(by_rank)
