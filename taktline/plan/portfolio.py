"""All ways to find plans, one after the other: named schedules, lists, local search, the solver."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from random import Random
from typing import TypeAlias

import numpy as np

from taktline.plan import solver
from taktline.plan.bound import lower_bound
from taktline.plan.costs import Costs
from taktline.plan.list_schedules import GOOD, Rules, filling, schedule
from taktline.plan.memory import peak_memory
from taktline.plan.passes import merge_backward
from taktline.plan.periodic import unrolled
from taktline.plan.plan import Placement, Plan
from taktline.plan.registry import find, names
from taktline.plan.schedules import v_limited
from taktline.plan.search import improve
from taktline.plan.timeline import By, simulate
from taktline.plan.work import MARGIN, Order, Run, Work, from_plan, run, to_plan

Progress: TypeAlias = Callable[[float, float], object]
"""Called with the share of the search that is done, and the best bubble so far."""


def fitting(work: Work, costs: Costs, *, slow: bool = True) -> Iterator[Plan]:
    """The plans of all known schedules with this placement that fit into the memory."""
    placement, limits = work.placement, np.array(work.memory) * (1 + MARGIN)
    per_rank = max(1, placement.stages // placement.ranks)
    few = 2 * placement.ranks

    def fits(plan: Plan) -> bool:
        return bool((peak_memory(plan, costs) <= limits).all())

    for name in names():
        known = find(name)
        if name in (() if slow else _SLOW):
            continue
        if name == "forward_only" or known.stages_per_rank not in (None, per_rank):
            continue
        if known.place(placement.ranks, per_rank) != placement:
            continue
        # What few micro-batches need, more need, too.
        if few < work.microbatches and not fits(known.build(placement.ranks, few, per_rank)):
            continue
        plan = known.build(placement.ranks, work.microbatches, per_rank)
        if fits(plan):
            yield plan


class Search:
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
        self.work, self.costs = work, costs
        self.by: By = by
        self.random, self.progress = Random(seed), progress
        self.ends = time.monotonic() + _SEARCH * seconds
        letters = len(work.time) * work.microbatches
        self.rounds = min(20_000, 40_000_000 // letters) if rounds is None else rounds
        self.plans: list[tuple[float, Plan]] = []
        self.orders: list[tuple[float, Order]] = []
        self.rules: list[tuple[float, Rules]] = []
        self.large = letters > _LARGE
        least = lower_bound(work, costs)
        self.least = least.span if by == "span" else least.makespan
        self.shortest = math.inf

    def run(self, *, solve: bool) -> None:
        """All ways to find plans, one after the other."""
        placement = self.work.placement
        enough = (2 if self.large else 3) * placement.ranks
        few = replace(self.work, microbatches=min(enough, self.work.microbatches))
        unrolls = few.microbatches < self.work.microbatches
        self._listed(filling(self.work))
        for plan in fitting(self.work, self.costs, slow=not (unrolls and self.large)):
            self._add(plan)
            self._keep(None if plan.rows.joined.any() else from_plan(plan))
        if not (unrolls and self.large):
            self._patterned()
        if unrolls:
            self._unrolled(few)
        if self.large or not unrolls:
            self._varied()
        if not self.orders and not self.plans:
            self._keep(schedule(self.work, Rules(reach=math.inf, fill=1.0)))
        if not self.large:  # one letter of so many changes little
            self._improved()
        if solve and placement.stages <= placement.ranks and solver.solvable(self.work):
            self._solved()

    def best(self) -> Plan:
        """The best plan as the simulator times it."""
        for _, order in self.orders[: 1 if self.large else 2]:
            plan = to_plan(self.work, order, "optimised")
            self._add(plan)
            if self.costs.backward is not None:
                self._add(merge_backward(plan))
        return min(self.plans, key=lambda each: each[0])[1]

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

    def _keep(self, order: Order | None) -> float:
        """The score of an order, which is kept if it runs and is among the best."""
        found = None if order is None else run(self.work, order)
        if order is None or found is None:
            return math.inf
        score = self._score(found)
        self.shortest = min(self.shortest, found.span if self.by == "span" else found.makespan)
        if not any(abs(score - other) <= _LITTLE**2 * score for other, _ in self.orders):
            self.orders.append((score, order))
            self.orders.sort(key=lambda each: each[0])
            del self.orders[_KEPT:]
        return score

    def _ends(self, done: float) -> bool:
        """Whether there is no time left, or nothing to find; reports what share is done."""
        if self.progress is not None and self.orders:
            work = self.work
            busy = work.microbatches * sum(work.time) / work.placement.ranks
            self.progress(done, 1 - busy / self.orders[0][0] if busy else 0.0)
        return time.monotonic() >= self.ends or self.shortest <= self.least * (1 + _LITTLE)

    def _patterned(self) -> None:
        """In a V, the pattern of V-Half with as many activations as there is memory for."""
        placement, work = self.work.placement, self.work
        if placement != Placement.v(placement.ranks):
            return
        most = min(limit / (max(work.takes) or 1.0) for limit in work.memory) * (1 + MARGIN)
        limit = int(min(most, 2 * placement.ranks))
        if limit >= 2 * ((placement.ranks + 4) // 3):
            rows = v_limited(placement, work.microbatches, limit)
            self._keep(from_plan(Plan(rows, placement, work.microbatches)))

    def _unrolled(self, few: Work) -> None:
        """Orders for fewer micro-batches, their middle repeated; and the rules that are good."""
        seconds, rounds = (self.ends - time.monotonic()) / 3, min(self.rounds, 5_000)
        seed = self.random.randrange(2**31)
        inner = Search(few, self.costs, self.by, seed, seconds, rounds, None)
        inner.run(solve=False)
        more = self.work.microbatches - few.microbatches
        for (_, order), at_once in product(inner.orders, (1, 2)):
            if more % at_once == 0 and not (self.orders and self._ends(0.0)):
                self._keep(unrolled(few, order, more=more, at_once=at_once))
        for _, rules in inner.rules:
            if not self.large and not (self.orders and self._ends(_LISTED)):
                self._listed(rules)

    def _varied(self) -> None:
        """Rules for lists: some that are known, and the best of them varied again and again."""
        letters = len(self.work.time) * self.work.microbatches
        tries = max(len(GOOD), min(300, 600_000 // letters))
        left = self.ends - time.monotonic()
        stops = time.monotonic() + left * (1.0 if self.large else _MOST_LISTED)
        took = 0.0
        for turn in range(tries):
            begin = time.monotonic()
            # The plan of a large order takes as long to make as the order.
            if self._ends(_LISTED * turn / tries) or begin + 2 * took >= stops:
                return
            rules = GOOD[turn % len(GOOD)]
            if turn >= len(GOOD) and self.rules:
                rules = self.random.choice(self.rules)[1].varied(self.random)
            self._listed(rules)
            took = max(took, time.monotonic() - begin)

    def _listed(self, rules: Rules) -> None:
        """Keep the order that rules lead to, and the rules if they are among the best."""
        score = self._keep(schedule(self.work, rules))
        if score < math.inf:
            self.rules.append((score, rules))
            self.rules.sort(key=lambda each: each[0])
            del self.rules[_KEPT:]

    def _improved(self) -> None:
        """The best few, each improved by local search; then the best of all, with more heat."""
        starts, by_span = self.orders[:], self.by == "span"
        for place in range(len(starts) + _AGAIN):

            def stop(turn: int, place: int = place) -> bool:
                share = (place + turn / self.rounds) / (len(starts) + _AGAIN)
                return self._ends(_LISTED + (1 - _LISTED) * share)

            if not self.rounds or not self.orders or stop(0):
                return
            first = place < len(starts)
            _, order = starts[place] if first else self.orders[0]
            heat = (0.15 if first else 0.3) * self.work.period
            rounds, random = self.rounds, self.random
            self._keep(
                improve(self.work, order, by_span, random, rounds=rounds, heat=heat, stop=stop)
            )

    def _solved(self) -> None:
        """What the solver makes of the best."""
        left = min(_SOLVED, (self.ends - time.monotonic()) / 2)
        if left > 0 and not self._ends(_LISTED):
            by_span, hint = self.by == "span", self.orders[0][1]
            seed = self.random.randrange(2**31)
            order, _ = solver.solve(self.work, hint, by_span, seconds=left, seed=seed)
            self._keep(order)


_SLOW = ("v_half", "v_min")
"""The schedules whose plans take long to make if they are large."""
_LARGE = 30_000
"""From so many actions on, orders are listed once for each of few rules, and not improved."""
_LITTLE = 1e-6
_SEARCH = 0.95  # of the time; in the rest the plan is made
_KEPT = 6
"""So many of the best are kept, and improved."""
_AGAIN = 3
_LISTED = 0.3  # the share of the search that lists orders
_MOST_LISTED = 0.5  # of the time
_SOLVED = 20.0
"""The seconds of the solver, by its own count."""
