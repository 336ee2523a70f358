"""What is to be planned, in plain numbers: durations, hops, memory, and how orders of it run.

An order is one word for each rank. Its letters are ``3 * stage + kind``, with 0 for F, 1 for I and
2 for W; the n-th of a letter is micro-batch n. Searches try thousands of orders, so these are plain
lists, and an order is judged without making an object for any action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from taktline.plan.action import Kind
from taktline.plan.costs import Costs
from taktline.plan.plan import Placement, Plan
from taktline.plan.rows import IntArray, Rows

Order: TypeAlias = list[list[int]]
"""For each rank, its letters."""

MARGIN = 1e-9
"""The part of the memory by which sums of activations may miss it, as they are rounded."""

KINDS = (Kind.F, Kind.I, Kind.W)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Costs for a placement and a number of micro-batches, by letter or by rank."""

    placement: Placement
    microbatches: int
    rank: list[int]
    """The rank of each letter."""
    time: list[float]
    """How long each letter takes."""
    source: list[int]
    """The letter whose result each letter needs; -1 if it needs none, or order is enough."""
    hop: list[float]
    """From the end of each letter until its result is where it is needed."""
    takes: list[float]
    """The memory that each letter takes, when it begins."""
    frees: list[float]
    """The memory that each letter releases, when it ends."""
    memory: list[float]
    """What each rank may hold."""

    @classmethod
    def of(
        cls, costs: Costs, placement: Placement, microbatches: int, memory: Sequence[float]
    ) -> Work:
        """The work of all stages at these costs."""
        stages, rank_of = placement.stages, placement.rank_of
        times = [costs.of(name, stages) for name in _TIMES]
        whole, kept = (costs.keeps(placement, part) for part in ("activation", "kept_for_weight"))
        # From each letter to the one that needs its message; a W sends none.
        hop = [*np.sum(costs.messages(placement), axis=0).tolist(), [0.0] * stages]
        if costs.comm_blocks:
            times = [time + np.array(flight) for time, flight in zip(times, hop, strict=True)]
            hop = [[0.0] * stages] * 3
        last = 3 * stages - 3
        source = [
            letter + (-3, 3, 0)[letter % 3]
            if letter % 3 < 2 and letter not in (0, last + 1)
            else -1
            for letter in range(3 * stages)
        ]
        none = np.zeros(stages)
        return cls(
            placement,
            microbatches,
            [rank for rank in rank_of for _ in KINDS],
            _by_letter(times),
            source,
            _by_letter(hop),
            _by_letter([whole, none, none]),
            _by_letter([none, whole - kept, kept]),
            list(memory),
        )

    @property
    def period(self) -> float:
        """The time that the busiest rank needs for one micro-batch."""
        return float(np.bincount(self.rank, self.time).max())


_TIMES = ("forward", "backward_input", "backward_weight")


def _by_letter(columns: Sequence[Sequence[float] | np.ndarray]) -> list[float]:
    return np.stack([np.asarray(column, float) for column in columns], 1).ravel().tolist()


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """When an order runs."""

    starts: list[list[float]]
    """When each rank's letters start."""
    needed: list[list[float]]
    """When what they need is there; 0 if they need nothing."""
    first: list[float]
    """The start of each rank."""
    last: list[float]
    """The end of each rank."""
    trace: list[int]
    """The ranks in the order in which their letters can run one by one."""

    @property
    def makespan(self) -> float:
        """The end of the last action."""
        return max(self.last)

    @property
    def span(self) -> float:
        """The longest own span of a rank."""
        return max(end - begin for begin, end in zip(self.first, self.last, strict=True))


def run(work: Work, order: Order) -> Run | None:
    """Run an order, every letter as early as it can; None if it locks up.

    Each rank runs until it needs what is not there, and is woken by the rank that makes it.
    """
    time, source, hop, rank_of = work.time, work.source, work.hop, work.rank
    arrivals: list[list[float]] = [[] for _ in time]
    count = [0] * len(time)
    waiting = [False] * len(time)  # for the next of this letter
    at, clock = [0] * len(order), [0.0] * len(order)
    starts: list[list[float]] = [[] for _ in order]
    needed: list[list[float]] = [[] for _ in order]
    trace: list[int] = []
    ready = list(range(len(order) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        word, begun, got, now = order[rank], starts[rank], needed[rank], clock[rank]
        begin = at[rank]
        for place in range(begin, len(word)):
            letter = word[place]
            needs = source[letter]
            if needs >= 0:
                number = count[letter]
                there = arrivals[needs]
                if number >= len(there):
                    waiting[needs] = True
                    at[rank] = place
                    break
                count[letter] = number + 1
                got.append(there[number])
                if there[number] > now:
                    now = there[number]
            else:
                got.append(0.0)
            begun.append(now)
            now += time[letter]
            arrivals[letter].append(now + hop[letter])
            if waiting[letter]:
                waiting[letter] = False
                ready.append(rank_of[letter + (3, -3)[letter % 3]])
        else:
            at[rank] = len(word)
        clock[rank] = now
        trace += [rank] * (at[rank] - begin)
    if any(place < len(word) for place, word in zip(at, order, strict=True)):
        return None
    first = [begun[0] if begun else 0.0 for begun in starts]
    return Run(starts, needed, first, clock, trace)


def to_plan(work: Work, order: Order, name: str) -> Plan:
    """The plan of an order."""
    rows = [_rows(np.array(word, np.int64)) for word in order]
    return Plan(rows, work.placement, work.microbatches, name=name)


def _rows(letters: IntArray) -> Rows:
    """The n-th of a letter is micro-batch n."""
    by_letter = np.argsort(letters, kind="stable")
    counts = np.bincount(letters)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    number = np.empty_like(letters)
    number[by_letter] = np.arange(len(letters)) - before
    return Rows.of(np.array(KINDS)[letters % 3], letters // 3, number)


def from_plan(plan: Plan) -> Order | None:
    """The order of a plan whose micro-batches pass each stage in turn, with every B as I and W."""
    order: Order = []
    for rank in range(plan.ranks):
        rows = plan.rows_of(rank)
        both = rows.kind == Kind.B
        again = np.repeat(np.arange(len(rows)), 1 + both)
        kind = np.searchsorted(KINDS, rows.kind)[again]  # a B as an I, and its second half:
        kind[1:][(again[1:] == again[:-1])] = 2
        letters = 3 * rows.stage[again].astype(np.int64) + kind
        numbers = rows.microbatch[again]
        if not np.array_equal(_rows(letters).microbatch, numbers):
            return None
        order.append(letters.tolist())
    return order
