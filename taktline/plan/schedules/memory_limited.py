"""Schedules in a V under a memory limit: V-Half and V-Min, from one generator.

A plain greedy choice fills the memory with forwards that then wait for one another. So each action
gets a due time from a pattern that repeats every period, the work of one micro-batch on a rank. A
rank runs what is due first; while that cannot run yet, it does a pending W; failing that, it runs
ahead of the pattern, by one period at most. So the pattern is kept where all ranks are busy, and
the gaps of warm-up and cool-down are filled.

The limit holds whatever the actions cost, for it follows from the order on each rank alone: an
activation is counted from its F to its W. The order never locks up: a rank's first stage leaves
room for its second, so the oldest micro-batch under way can always go on.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque

from taktline.plan.action import Action, Kind
from taktline.plan.placement import Placement
from taktline.plan.rows import Rows
from taktline.plan.schedules._registry import register
from taktline.plan.schedules.v_shaped import zbv

_PERIOD = 6  # F, I and W of two stages
_TURN = 3  # units between F and I of the last stage in the pattern


def v_limited(placement: Placement, microbatches: int, limit: int) -> list[Rows]:
    """All ranks' actions, with at most ``limit`` activations on a rank, from V-Min's number up."""
    if limit >= 2 * placement.ranks:
        return zbv(placement, microbatches)
    ranks = _Ranks(placement.ranks, microbatches, limit)
    moved = True
    while ranks.unfinished():
        # All ranks choose, then all run. If no rank can move, the pattern is in the way.
        reach = _PERIOD * ranks.unit if moved else math.inf
        choices = [(rank, ranks.choose(rank, reach)) for rank in range(placement.ranks)]
        moves = [(rank, place) for rank, place in choices if place is not None]
        for rank, place in moves:
            ranks.run(rank, place)
        moved = bool(moves)
    return [Rows.from_actions(actions) for actions in ranks.actions]


class _Ranks:
    """The state of all ranks while the plan is written, tick by tick."""

    def __init__(self, count: int, microbatches: int, limit: int) -> None:
        self.count, self.microbatches, self.limit = count, microbatches, limit
        self.actions: list[list[Action]] = [[] for _ in range(count)]
        # Actions W of each rank whose I has run.
        self.weights: list[deque[Action]] = [deque() for _ in range(count)]
        # For each stage, the micro-batches through it and the activations held for it.
        self.through = {kind: [0] * (2 * count) for kind in (Kind.F, Kind.I)}
        self.live = [0] * (2 * count)

        # Due times of micro-batch 0, in whole numbers. It moves one rank in a unit on the way down,
        # and takes somewhat longer on the way up. Both stages of a rank then hold its activations
        # for 4·count + 2·_TURN units and twice the whole stretch together, which is the memory in
        # use times the period: the stretch is what the limit leaves over.
        self.unit = unit = max(1, count - 1)
        up = unit + max(0, 3 * limit - 2 * count - 4 - _TURN)
        last = 2 * count - 1
        at_loss = unit * count + up * (count - 1) + unit * (1 + _TURN)
        # For each rank its next action of each kind and stage, as (due, tie, kind, stage). Of two
        # that are due at once, the later in a micro-batch's life goes first.
        self.queues = [
            sorted(
                [
                    (unit * rank, 3, Kind.F, rank),
                    (unit * count + up * (count - 1 - rank), 2, Kind.F, last - rank),
                    (at_loss + unit * rank, 1, Kind.I, last - rank),
                    (at_loss + unit * count + up * (count - 1 - rank), 0, Kind.I, rank),
                ]
            )
            for rank in range(count)
        ]

    def unfinished(self) -> bool:
        return any(self.queues) or any(self.weights)

    def choose(self, rank: int, reach: float) -> int | None:
        """The place in the rank's queue of what to run now; -1 for a W, None for nothing."""
        queue, pending = self.queues[rank], self.weights[rank]
        for place, (due, _, kind, stage) in enumerate(queue):
            if place and (pending or due - queue[0][0] > reach):
                break
            if self._ready(kind, stage):
                return place
        return -1 if pending else None

    def _ready(self, kind: Kind, stage: int) -> bool:
        number, last = self.through[kind][stage], len(self.live) - 1
        if kind is Kind.I:
            from_next = stage == last or self.through[Kind.I][stage + 1] > number
            return from_next and self.through[Kind.F][stage] > number
        if stage > 0 and self.through[Kind.F][stage - 1] <= number:
            return False
        first = stage < self.count  # which leaves room for the rank's second stage
        on_rank = self.live[stage] + self.live[last - stage]
        return on_rank < self.limit and not (first and self.live[stage] >= self.limit - 1)

    def run(self, rank: int, place: int) -> None:
        """Write down the chosen action, and put the next of its kind into the queue."""
        if place < 0:
            action = self.weights[rank].popleft()
            self.live[action.stage] -= 1
            self.actions[rank].append(action)
            return
        due, tie, kind, stage = self.queues[rank].pop(place)
        number = self.through[kind][stage]
        self.through[kind][stage] += 1
        if number + 1 < self.microbatches:
            insort(self.queues[rank], (due + _PERIOD * self.unit, tie, kind, stage))
        if kind is Kind.F:
            self.live[stage] += 1
        else:
            self.weights[rank].append(Action(stage, Kind.W, number))
        self.actions[rank].append(Action(stage, kind, number))


@register("v_half", stages_per_rank=2, place=Placement.v)
def v_half(placement: Placement, microbatches: int) -> list[Rows]:
    """Half of 1F1B's memory and half of its bubble, with two stages per rank in a V.

    v_half: 4 ranks × 2 stages, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2                 7F0 7I0 7F1 0F3 7I1 7W0 7F2 7W1 0I0 7I2 0W0 7W2 7F3 7I3 …
    rank 1 │     1F0 1F1 1F2         6F0     6F1 6I0 6W0 1F3 6F2 6I1 1I0 6W1 1W0 6I2 6F3 6W2 1I1 …
    rank 2 │         2F0 2F1     5F0 2F2 5F1     5F2 5I0 5W0 2F3 2I0 5I1 2W0 5W1 5F3 5I2 2I1 5W2 …
    rank 3 │             3F0 4F0 3F1 4F1 3F2 4F2         4I0 3I0 4W0 3F3 3W0 4F3 4I1 3I1 4I2 3I2 …

    Bubble: at most max(0, 6p-3k-1) in each rank's own span, where F=I=W=1 and there are at least 2p
    micro-batches; 1F1B's is 6(p-1) in these units.
    Memory: at most k = 2·((p+2)//2) activations of a stage, where 1F1B holds the equal of 2p.
    Source: Controllable Memory, arXiv 2405.15362.
    """
    return v_limited(placement, microbatches, limit=2 * ((placement.ranks + 2) // 2))


@register("v_min", stages_per_rank=2, place=Placement.v)
def v_min(placement: Placement, microbatches: int) -> list[Rows]:
    """A third of 1F1B's memory and two thirds of its bubble, with two stages per rank in a V.

    v_min: 4 ranks × 2 stages, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2                 7F0 7I0 7W0         7F1 7I1 7W1 0I0 0W0 0F3     7F2 7I2 …
    rank 1 │     1F0 1F1             6F0 1F2     6I0 6W0 6F1         1I0 6I1 1W0 6W1 6F2 1F3 1I1 …
    rank 2 │         2F0 2F1     5F0     5F1         5I0 5W0 2F2 2I0 2W0     5I1 5F2 5W1 2I1 2F3 …
    rank 3 │             3F0 4F0 3F1 4F1                 4I0 3I0 4W0 3F2 3W0 4F2 4I1 3I1 4W1 3W1 …

    Bubble: at most max(0, 6p-3k-1) in each rank's own span, where F=I=W=1 and there are at least 2p
    micro-batches; 1F1B's is 6(p-1) in these units.
    Memory: at most k = 2·((p+4)//3) activations of a stage, where 1F1B holds the equal of 2p.
    Source: Controllable Memory, arXiv 2405.15362.
    """
    return v_limited(placement, microbatches, limit=2 * ((placement.ranks + 4) // 3))
