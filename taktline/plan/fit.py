"""Makes a plan fit into less memory: what to copy to the host, what to compute again, and when.

Memory follows from the order of actions, so a plan that fits does so whatever its times are; times
only decide which way is quickest. Each rank is tried in several ways, at the times of the plan and
then at those of the best result, and whole plans are compared by simulation.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias, get_args

import numpy as np

from taktline.checks import check, check_one_of, refuse
from taktline.errors import CostError, PlanError, ScheduleError
from taktline.plan.action import Kind
from taktline.plan.costs import Costs
from taktline.plan.deps import GRADIENT, Where
from taktline.plan.memory import memory_curve, peak_memory
from taktline.plan.plan import Level, Plan
from taktline.plan.rows import FloatArray, IntArray, Rows, as_numbers
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
    timeline, can = simulate(plan, costs), (costs.offload is not None, costs.recompute is not None)
    ranks = [_Rank(timeline, rank, plan, costs, math.inf) for rank in range(plan.ranks)]
    found = [min((each.peak for each in rank.extremes(*can)), default=math.inf) for rank in ranks]
    return np.minimum(peak_memory(plan, costs), found)


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


@dataclass(frozen=True, slots=True, eq=False)
class _Lives:
    """The activations of a rank, a number each."""

    stage: IntArray
    microbatch: IntArray
    made: IntArray
    """The step of its F."""
    used: IntArray
    """That of its B or I."""
    moved: FloatArray
    """What an OFFLOAD frees."""
    less: FloatArray
    """What recomputation saves."""
    offload: FloatArray
    reload: FloatArray
    recompute: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """What becomes of a rank's activations."""

    copies: dict[int, tuple[int, int]]
    """Of some, before which steps their OFFLOAD and RELOAD are."""
    again: list[int]
    """Those that are recomputed."""
    peak: float


class _Rank:
    """The steps of a rank, an overlapped pair being one, with their times and memory."""

    def __init__(
        self, timeline: Timeline, rank: int, plan: Plan, costs: Costs, host: float
    ) -> None:
        self.rows, self.host = plan.rows_of(rank), host
        self.first = np.flatnonzero(~self.rows.second_of_pair())
        """The first row of each step."""
        mine = slice(int(plan.offsets[rank]), int(plan.offsets[rank + 1]))
        during, _ = memory_curve(plan, costs)
        self.level = np.maximum.reduceat(during[mine], self.first)
        timed = timeline.plan
        runs = timed.rank_of_rows() == rank
        runs &= (timed.rows.kind <= Kind.W) & (timed.rows.kind != Kind.RECOMPUTE)
        self.start = timeline.start[runs][self.first].tolist()
        self.end = timeline.end[runs][self.first].tolist()
        self.lives = self._lives(plan, costs, mine.start)

    def _lives(self, plan: Plan, costs: Costs, offset: int) -> _Lives:
        step_of = np.cumsum(~self.rows.second_of_pair()) - 1
        at = np.flatnonzero(self.rows.kind == Kind.F)
        stage, microbatch = self.rows.stage[at], self.rows.microbatch[at]
        back = Where(plan).rows(GRADIENT, stage, microbatch) - offset
        parts = ("activation", "offloadable", "kept_for_recompute")
        whole, moved, kept = (costs.keeps(plan.placement, part)[stage] for part in parts)
        names = ("offload", "reload", "recompute")
        times = [costs.of(name, plan.stages)[stage] for name in names]
        return _Lives(stage, microbatch, step_of[at], step_of[back], moved, whole - kept, *times)

    def choose(self, limit: float, pace: float | None, every: bool, again: bool) -> _Choice:
        """Copies with engines that take ``pace`` of their time, and then what is recomputed.

        At a pace of 1 they are hidden; at 0, the rank waits for each. None: there are no copies.
        """
        lives, start, end = self.lives, np.array(self.start), np.array(self.end)
        picked = self._within_host(range(len(lives.stage)) if every else ())
        repeated, free = list[int](), (lives.moved > 0) & (pace is not None)
        free[picked] = False
        begin, until = (pace or 0.0) * lives.offload, (pace or 0.0) * lives.reload
        begin, until = end[lives.made] + begin, start[lives.used] - until
        longest = np.argsort(begin - until, kind="stable")
        cost = lives.recompute - (start[lives.used] - np.append(0.0, end)[lives.used])
        # What fits into idle time is free; the longest of these first.
        cost = np.maximum(cost, 0.0) / np.maximum(lives.less, 1e-300)
        order = np.lexsort((lives.made - lives.used, cost))
        while True:
            copies = self._placed(picked, pace or 0.0)
            level = self._level(copies, repeated)
            over, more = np.flatnonzero(level > limit).tolist(), list[int]()
            for step in over if not repeated else ():
                away = free & (lives.made + 1 < step) & (step < lives.used)
                away &= (begin <= start[step]) & (end[step] <= until)
                more = longest[away[longest]]
                before = np.cumsum(lives.moved[more]) - lives.moved[more]
                more = more[before < level[step] - limit].tolist()
                if more:
                    free[more] = False
                    picked = self._within_host([*picked, *more])
                    break
            if over and again and not more:
                spans = (lives.made <= over[0]) & (over[0] < lives.used) & (lives.less > 0)
                spans[repeated] = False
                more = order[spans[order]][:1].tolist()
                repeated = repeated + more
                picked = [life for life in picked if life not in more]
            if not more:
                return _Choice(copies, repeated, float(level.max()))

    def extremes(self, copies: bool, again: bool) -> Iterator[_Choice]:
        """What saves most: all copied, all recomputed, and for each stage what saves more of it."""
        lives, every = self.lives, list(range(len(self.lives.stage)))
        smaller = [life for life in every if lives.moved[life] > lives.less[life]]
        for picked in ([every] * copies) + [[]] * again + [smaller] * (copies and again):
            placed = self._placed(self._within_host(picked), 0.0)
            rest = [life for life in every if again and life not in placed]
            repeated = rest if lives.less.any() and picked != every else []
            yield _Choice(placed, repeated, float(self._level(placed, repeated).max()))

    def _within_host(self, picked: Iterable[int]) -> list[int]:
        """As many of these as the host can hold, those first that live longest."""
        lives, kept, host = self.lives, list[int](), np.zeros(len(self.level))
        for life in sorted(picked, key=lambda life: lives.made[life] - lives.used[life]):
            held = slice(int(lives.made[life]) + 1, int(lives.used[life]) + 1)
            if host[held].max() + lives.moved[life] <= self.host:
                host[held] += lives.moved[life]
                kept.append(life)
        return kept

    def _placed(self, picked: Iterable[int], pace: float) -> dict[int, tuple[int, int]]:
        """Before which steps to copy: to the host as early as possible, and back as late.

        An activation for which this leaves no time stays.
        """
        lives, start, end, soonest = self.lives, self.start, self.end, math.inf
        picked, back = sorted(picked, key=lambda life: int(lives.made[life])), dict[int, int]()
        for life in sorted(picked, key=lambda life: -int(lives.used[life])):
            used = int(lives.used[life])
            begin = min(start[used], soonest) - pace * float(lives.reload[life])
            step = min(bisect_right(end, begin + _LITTLE * abs(begin)), used)
            if step >= lives.made[life] + 2:
                back[life], soonest = step, begin
        reloads, copies, ends = sorted(back.values()), dict[int, tuple[int, int]](), -math.inf
        waiting = [life for life in picked if life in back][::-1]
        for step in range(1, len(end)):
            while waiting and back[waiting[-1]] <= step:
                waiting.pop()
            if not waiting or lives.made[waiting[-1]] >= step:
                continue
            begin = max(end[step - 1], ends)
            over = begin + pace * float(lives.offload[waiting[-1]])
            following = start[reloads[bisect_right(reloads, step)]]
            # The rank's next copy waits for this one, as this one has waited for the last.
            if begin <= start[step] + _LITTLE * begin and over <= following + _LITTLE * over:
                life, ends = waiting.pop(), over
                copies[life] = step, back[life]
        return copies

    def _level(self, copies: dict[int, tuple[int, int]], again: Iterable[int]) -> FloatArray:
        """The memory at each step."""
        level, lives = self.level.copy(), self.lives
        steps = sorted({step for both in copies.values() for step in both})
        for life, (out, back) in copies.items():
            level[steps[bisect_left(steps, out) + 1] : back] -= lives.moved[life]
        for life in again:
            level[lives.made[life] : lives.used[life]] -= lives.less[life]
        return level

    def with_actions(self, choice: _Choice) -> Rows:
        """The rank's rows with those of a choice. At a step, RELOADs are before OFFLOADs."""
        lives = self.lives
        rows = [
            *(
                (back, 0, lives.used[life], Kind.RELOAD, life)
                for life, (_, back) in choice.copies.items()
            ),
            *(
                (out, 1, lives.made[life], Kind.OFFLOAD, life)
                for life, (out, _) in choice.copies.items()
            ),
            *((int(lives.used[life]), 2, 0, Kind.RECOMPUTE, life) for life in choice.again),
        ]
        if not rows:
            return self.rows
        step, _, _, kind, life = np.array(sorted(rows)).T
        new = Rows.of(kind, lives.stage[life], lives.microbatch[life])
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
    can_copy, can_repeat = costs.offload is not None, costs.recompute is not None
    ways = [
        (pace, every, again)
        for pace, every, again in _WAYS
        if (pace is None or can_copy) and (can_repeat or not again)
    ]
    options: list[list[Rows]] = []
    short: list[str] = []
    for rank, limit in enumerate((limits * (1 + MARGIN)).tolist()):
        if peak_memory(plan, costs)[rank] <= limit:
            options.append([plan.rows_of(rank)] * len(ways))
            continue
        subject = _Rank(timeline, rank, plan, costs, float(hosts[rank]))
        least = min(subject.extremes(can_copy, can_repeat), key=lambda choice: choice.peak)
        choices = [subject.choose(limit, *way) for way in ways]
        fits = [choice for choice in choices if choice.peak <= limit]
        if not fits and least.peak > limit:
            short.append(f"rank {rank} needs at least {least.peak:.10g}, not {limits[rank]:g}")
            continue
        options.append(
            [subject.with_actions(choice if choice.peak <= limit else least) for choice in choices]
        )
    if short:
        raise ScheduleError(f"plan {plan.name!r} does not fit into the memory: {'; '.join(short)}")
    for by_rank in zip(*options, strict=True):
        yield plan.with_rows(by_rank)
