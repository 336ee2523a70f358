"""The best plan for given costs: many are made by rules, the best are improved by local search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from random import Random
from typing import Literal, TypeAlias, get_args

import numpy as np

from taktline.checks import check, check_callable, check_one_of, known_keywords, refuse
from taktline.errors import CostError, PlanError, ScheduleError
from taktline.plan.bound import Bound, lower_bound
from taktline.plan.costs import Costs
from taktline.plan.list_schedules import Rules, pattern, schedule
from taktline.plan.passes import merge_backward
from taktline.plan.plan import Placement, Plan
from taktline.plan.registry import find, names
from taktline.plan.rows import as_numbers
from taktline.plan.search import improve
from taktline.plan.timeline import By, peak_memory, simulate
from taktline.plan.work import MARGIN, Order, Run, Work, from_plan, run, to_plan
from taktline.text import counted

Shape: TypeAlias = Literal["linear", "v", "looped"]
Memory: TypeAlias = float | Sequence[float]
Progress: TypeAlias = Callable[[float, float], object]
"""Called with the share of the search that is done, and the best bubble so far."""


@known_keywords
def bound(
    costs: Costs,
    *,
    ranks: int | None = None,
    microbatches: int,
    memory: Memory | None = None,
    placement: Placement | Shape = "linear",
    stages_per_rank: int = 2,
) -> Bound:
    """What no plan can beat with these costs, in this memory.

    The arguments are those of :func:`optimise`.

    >>> bound(Costs(), ranks=4, microbatches=8).bubble_of_makespan
    0.1111111111111111
    """
    work = _work(costs, ranks, microbatches, memory, placement, stages_per_rank)
    return lower_bound(work, costs)


@known_keywords
def optimise(
    costs: Costs,
    *,
    ranks: int | None = None,
    microbatches: int,
    memory: Memory | None = None,
    placement: Placement | Shape = "linear",
    stages_per_rank: int = 2,
    seconds: float = 60.0,
    rounds: int | None = None,
    by: By = "span",
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """The best plan that is found for these costs, in this memory.

    ``memory`` is in the unit of ``costs.activation``: one number for all ranks, or one for each. A
    ``placement`` by name has one stage per rank if it is linear, and ``stages_per_rank`` otherwise.
    ``by`` is what is made short: the longest own span of a rank, or the makespan. The search has a
    number of ``rounds``, which ``seconds`` may only cut short: then, and after Ctrl-C, the result
    is the best plan so far. Otherwise the same arguments lead to the same plan.

    >>> plan = optimise(Costs(), ranks=4, microbatches=8, memory=4, rounds=100)
    >>> simulate(plan).bubble("span") == bound(Costs(), ranks=4, microbatches=8, memory=4).bubble
    True
    """
    work = _work(costs, ranks, microbatches, memory, placement, stages_per_rank)
    check("seconds", seconds, float, error=ScheduleError)
    if seconds <= 0:
        refuse("seconds", "more than 0", seconds, ScheduleError)
    rounds = None if rounds is None else check("rounds", rounds, int, least=0)
    check_one_of("by", by, get_args(By), error=PlanError)
    check("seed", seed, int)
    if progress is not None:
        check_callable("progress", progress)
    search = _Search(work, costs, by, seed, seconds, rounds, progress)
    try:
        search.run()
    except KeyboardInterrupt:
        if not search.plans:
            raise
    return search.best()


def _work(
    costs: Costs,
    ranks: int | None,
    microbatches: int,
    memory: Memory | None,
    placement: Placement | Shape,
    stages_per_rank: int,
) -> Work:
    """The work that arguments describe, or an error that says what is wrong with them."""
    check("costs", costs, Costs, error=CostError)
    placement = _placement(ranks, placement, stages_per_rank)
    microbatches = check("microbatches", microbatches, int, least=1, error=ScheduleError)
    least = np.bincount(
        placement.rank_of, costs.of("activation", placement.stages), placement.ranks
    )
    if memory is None:
        return Work.of(costs, placement, microbatches, [math.inf] * placement.ranks)
    limits = as_numbers(memory)
    if limits is None or limits.ndim > 1 or (limits < 0).any():
        refuse("memory", "a number from 0 up, or one for each rank", memory, ScheduleError)
    if limits.ndim and len(limits) != placement.ranks:
        raise ScheduleError(
            f"memory is for {counted(len(limits), 'rank')}, but there are {placement.ranks}; pass "
            "one number for all, or one for each"
        )
    limits = np.broadcast_to(limits, placement.ranks).astype(float)
    short = np.flatnonzero(limits * (1 + MARGIN) < least)
    if len(short):
        rank = int(short[0])
        raise ScheduleError(
            f"no plan fits into memory {limits[rank]:g} on rank {rank}: one micro-batch in its "
            f"{counted(len(placement.stages_of(rank)), 'stage')} needs {least[rank]:g}; pass at "
            "least this, or cut the model into more ranks"
        )
    return Work.of(costs, placement, microbatches, limits.tolist())


def _placement(ranks: int | None, placement: Placement | Shape, stages_per_rank: int) -> Placement:
    if isinstance(placement, Placement):
        if ranks not in (None, placement.ranks):
            raise ScheduleError(
                f"the placement is for {counted(placement.ranks, 'rank')}, not {ranks}; leave out "
                "ranks"
            )
        return placement
    check_one_of("placement", placement, get_args(Shape), error=ScheduleError)
    if ranks is None:
        raise ScheduleError("pass ranks, or a Placement as placement")
    ranks = check("ranks", ranks, int, least=1, error=ScheduleError)
    each = check("stages_per_rank", stages_per_rank, int, least=1, error=ScheduleError)
    if placement == "linear":
        return Placement.linear(ranks)
    return (Placement.v if placement == "v" else Placement.loop)(ranks, each)


class _Search:
    """Plans and orders that were found so far, and the time that is left to find better ones."""

    def __init__(
        self,
        work: Work,
        costs: Costs,
        by: By,
        seed: int,
        seconds: float,
        rounds: int | None,
        progress: Progress | None,
    ) -> None:
        self.work, self.costs, self.by = work, costs, by
        self.random = Random(seed)
        self.ends = time.monotonic() + seconds
        letters = len(work.time) * work.microbatches
        self.rounds = max(1, 4_000_000 // letters) if rounds is None else rounds
        self.progress = progress
        self.plans: list[tuple[float, Plan]] = []
        self.orders: list[tuple[float, Order]] = []

    def score(self, found: Run) -> float:
        """What is made short; in a draw, the other one is, too."""
        one, other = found.span, found.makespan
        if self.by == "makespan":
            one, other = other, one
        return one + 1e-6 * other

    def out_of_time(self, needed: float = 0.0) -> bool:
        """Whether so many seconds are no longer left."""
        return time.monotonic() + needed >= self.ends

    def run(self) -> None:
        """All ways to find plans, one after the other."""
        self._named()
        self._listed()
        self._improved()

    def best(self) -> Plan:
        """The best plan as the simulator times it."""
        for _, order in sorted(self.orders, key=lambda each: each[0])[:2]:
            plan = to_plan(self.work, order, "optimised")
            for each in (plan, merge_backward(plan)):
                self._add(each)
        return min(self.plans, key=lambda each: each[0])[1]

    def _add(self, plan: Plan) -> None:
        timeline = simulate(plan, self.costs)
        other: By = "span" if self.by == "makespan" else "makespan"
        self.plans.append((timeline.cost(self.by) + 1e-6 * timeline.cost(other), plan))

    def _named(self) -> None:
        """The known schedules that fit."""
        placement, limits = self.work.placement, np.array(self.work.memory) * (1 + MARGIN)
        per_rank = placement.stages // placement.ranks
        for name in names():
            known = find(name)
            if name == "forward_only" or known.stages_per_rank not in (None, per_rank):
                continue
            if known.place(placement.ranks, per_rank) != placement:
                continue
            plan = known.build(placement.ranks, self.work.microbatches, per_rank)
            if (peak_memory(plan, self.costs) <= limits).all():
                self._add(plan)
                order = None if plan.rows.joined.any() else from_plan(plan)
                if order is not None:
                    self._keep(order)

    def _keep(self, order: Order) -> float:
        found = run(self.work, order)
        if found is None:
            return math.inf
        score = self.score(found)
        self.orders.append((score, order))
        self.orders.sort(key=lambda each: each[0])
        del self.orders[8:]
        return score

    def _listed(self) -> None:
        """Orders of the list scheduler, under many rules."""
        took = 0.0
        for rules in _portfolio(self.work):
            if self.orders and self.out_of_time(2 * took):
                return
            begin = time.monotonic()
            order = schedule(self.work, rules)
            if order is not None:
                self._keep(order)
            took = max(took, time.monotonic() - begin)

    def _improved(self) -> None:
        """The best few, each improved by local search."""
        for score, order in self.orders[:4]:
            if self.out_of_time():
                return
            better, order = improve(
                self.work,
                order,
                self.score,
                self.random,
                rounds=self.rounds,
                heat=0.05 * self.work.period,
                stop=self.out_of_time,
            )
            if better < score:
                self._keep(order)


def _portfolio(work: Work) -> Iterator[Rules]:
    """Rules that have been good for some costs."""
    period = work.period
    for down, up in product((1.0, 1.5, 2.0), (1.0, 1.5, 2.0)):
        due = pattern(work, down, up)
        for reach, fill, wait in product((period, 0.0, math.inf), (0.5, 0.0, 1.0), (0.0, 1.0)):
            yield Rules(due, period, reach, fill, wait)
