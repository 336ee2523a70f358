"""The best plan for given costs: many are made by rules, the best are improved by local search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Literal, TypeAlias, get_args

import numpy as np

from taktline.checks import check, check_callable, check_one_of, known_keywords, refuse
from taktline.errors import CostError, PlanError, ScheduleError
from taktline.plan.bound import Bound, lower_bound
from taktline.plan.costs import Costs
from taktline.plan.list_schedules import GOOD, Rules, schedule
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


def fitting(
    costs: Costs, placement: Placement, microbatches: int, memory: Memory | None = None
) -> list[Plan]:
    """The plans of all known schedules with this placement that fit into this memory."""
    return list(_fitting(_work(costs, None, microbatches, memory, placement, 1), costs))


def _fitting(work: Work, costs: Costs) -> Iterator[Plan]:
    placement, limits = work.placement, np.array(work.memory) * (1 + MARGIN)
    per_rank = max(1, placement.stages // placement.ranks)
    for name in names():
        known = find(name)
        if name == "forward_only" or known.stages_per_rank not in (None, per_rank):
            continue
        if known.place(placement.ranks, per_rank) == placement:
            plan = known.build(placement.ranks, work.microbatches, per_rank)
            if (peak_memory(plan, costs) <= limits).all():
                yield plan


class _Search:
    """What was found so far, and the time that is left to find something better."""

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
        self.random, self.progress = Random(seed), progress
        self.ends = time.monotonic() + seconds
        letters = len(work.time) * work.microbatches
        self.rounds = min(20_000, 40_000_000 // letters) if rounds is None else rounds
        self.plans: list[tuple[float, Plan]] = []
        self.orders: list[tuple[float, Order]] = []
        least = lower_bound(work, costs)
        self.least = least.span if by == "span" else least.makespan
        self.shortest = math.inf

    def run(self) -> None:
        """All ways to find plans, one after the other."""
        few = self._few()
        for plan in _fitting(self.work, self.costs):
            self._add(plan)
            order = None if plan.rows.joined.any() else from_plan(plan)
            if order is not None:
                self._keep(order)
        self._listed(few)
        self._improved()

    def best(self) -> Plan:
        """The best plan as the simulator times it."""
        for _, order in self.orders[:2]:
            plan = to_plan(self.work, order, "optimised")
            self._add(plan)
            if self.costs.backward is not None:
                self._add(merge_backward(plan))
        return min(self.plans, key=lambda each: each[0])[1]

    def _few(self) -> Work:
        """The same work with fewer micro-batches, which shows what rules are good."""
        return self.work.with_microbatches(
            min(self.work.microbatches, 3 * self.work.placement.ranks)
        )

    def _score(self, found: Run) -> float:
        """What is made short; in a draw, the other one is, too."""
        times = (found.span, found.makespan)
        one, other = times if self.by == "span" else times[::-1]
        return one + _LITTLE * other

    def _add(self, plan: Plan) -> None:
        timeline = simulate(plan, self.costs)
        times = (timeline.cost("span"), timeline.cost("makespan"))
        one, other = times if self.by == "span" else times[::-1]
        self.plans.append((one + _LITTLE * other, plan))

    def _keep(self, order: Order) -> None:
        """Keep an order, if it runs and is among the best."""
        found = run(self.work, order)
        if found is None:
            return
        score = self._score(found)
        self.shortest = min(self.shortest, found.span if self.by == "span" else found.makespan)
        if not any(abs(score - other) <= _LITTLE**2 * score for other, _ in self.orders):
            self.orders.append((score, order))
            self.orders.sort(key=lambda each: each[0])
            del self.orders[_KEPT:]

    def _ends(self, done: float) -> bool:
        """Whether there is no time left, or nothing to find; reports what share is done."""
        if self.progress is not None and self.orders:
            work = self.work
            busy = work.microbatches * sum(work.time) / work.placement.ranks
            self.progress(done, 1 - busy / self.orders[0][0] if busy else 0.0)
        return time.monotonic() >= self.ends or self.shortest <= self.least * (1 + _LITTLE)

    def _listed(self, few: Work) -> None:
        """Orders of the list scheduler: rules are varied as long as they become better."""
        letters = len(few.time) * few.microbatches
        known: list[tuple[float, Rules]] = []
        tries = max(len(GOOD), min(300, 600_000 // letters))
        for turn in range(tries):
            if self._ends(_LISTED * turn / tries):
                break
            rules = (
                GOOD[turn] if turn < len(GOOD) else self.random.choice(known)[1].varied(self.random)
            )
            found = schedule(few, rules)
            ran = None if found is None else run(few, found)
            if ran is not None:
                known.append((self._score(ran), rules))
                known.sort(key=lambda each: each[0])
                del known[_KEPT:]
        for _, rules in known:
            order = schedule(self.work, rules)
            if order is not None:
                self._keep(order)
            if self._ends(_LISTED):
                break

    def _improved(self) -> None:
        """The best few, each improved by local search."""
        heat = 0.15 * self.work.period
        starts = self.orders[:]
        for place, (_, order) in enumerate(starts):

            def stop(turn: int, place: int = place) -> bool:
                share = (place + turn / self.rounds) / len(starts)
                return self._ends(_LISTED + (1 - _LISTED) * share)

            if self.rounds and not stop(0):
                by_span = self.by == "span"
                rounds, random = self.rounds, self.random
                self._keep(
                    improve(self.work, order, by_span, random, rounds=rounds, heat=heat, stop=stop)
                )


_LITTLE = 1e-6
_KEPT = 6
"""So many of the best are kept, and improved."""
_LISTED = 0.3
"""The share of the search that lists orders."""
