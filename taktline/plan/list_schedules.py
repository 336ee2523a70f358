"""A list scheduler: whenever a rank is free, it chooses among what could run, by rules.

Every letter has a due time, and is due again for each further micro-batch one period later: the
due times draw a pattern, as on paper, and the scheduler fits it to real costs and memory::

    due      F of stage 0 at 0, of stage 1 at 5, … I of stage 0 at 60; period 10
    rank 0 │ runs what is due first, of what is there and fits into memory
           │ or a W, if nothing else would be delayed by it
           │ or what is due later, if it is not too early
           │ or waits for the next message
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from heapq import heapify, heappop, heappush
from itertools import product
from random import Random

from taktline.plan.work import MARGIN, Order, Work


@dataclass(frozen=True, slots=True)
class Rules:
    """How a rank chooses; times are in periods, the time of the busiest rank for a micro-batch."""

    down: float = 1.0
    """The pace of the pattern from F to F, as a multiple of what stages and messages take."""
    up: float = 1.0
    """The pace from I to I."""
    turn: float = 0.0
    """The pause in the pattern between F and I of the last stage."""
    period: float = 1.0
    """After how long the next micro-batch is due."""
    reach: float = 1.0
    """How far beyond what is due first a rank may run ahead."""
    fill: float = 0.5
    """The part of a W by which it may delay what comes next."""
    wait: float = 0.0
    """The part of an F or I that it must not delay what is due earlier by; with 0, by nothing."""

    def varied(self, random: Random) -> Rules:
        """Other rules, much like these."""
        changes: dict[str, float] = {}
        for _ in range(random.choice((1, 1, 2))):
            name = random.choice(_FIELDS)
            value = getattr(self, name)
            if name in ("down", "up"):
                changes[name] = value * math.exp(random.gauss(0, 0.12))
            elif name == "turn":
                changes[name] = max(0.0, value + random.gauss(0, 0.2))
            elif name == "period":
                changes[name] = 1 + random.gauss(0, 0.03)
            elif name == "reach":
                changes[name] = random.choice((0.0, 1.0, math.inf, 2 * random.random()))
            else:
                changes[name] = random.choice((0.0, 1.0, random.random()))
        return replace(self, **changes)


_SLOWEST = 3.0
_FIELDS = [field.name for field in fields(Rules)]

GOOD = [
    Rules(down, up, reach=reach, fill=fill, wait=wait)
    for down, up in product((1.0, 1.5, 2.0), repeat=2)
    for reach, fill, wait in (
        (1.0, 0.5, 1.0),
        (math.inf, 0.0, 0.0),
        (0.0, 0.0, 1.0),
        (1.0, 1.0, 0.0),
    )
]
"""Rules that are good for some costs, to begin with."""


def filling(work: Work) -> Rules:
    """Rules whose pattern keeps as many micro-batches under way as there is memory for."""
    pace, most = 1.0, _SLOWEST
    for _ in range(12):
        middle = (pace + most) / 2
        pace, most = (middle, most) if _fits(work, middle) else (pace, middle)
    return Rules(pace, pace, reach=1.0, fill=0.5, wait=1.0)


def _fits(work: Work, pace: float) -> bool:
    """Whether a pattern of this pace fits into the memory of all ranks, on average."""
    due, held = pattern(work, Rules(pace, pace)), [0.0] * work.placement.ranks
    for forward in range(0, len(due), 3):
        released = due[forward + 1] + work.time[forward + 1] + work.time[forward + 2]
        held[work.rank[forward]] += work.takes[forward] * (released - due[forward])
    return all(part <= work.period * limit for part, limit in zip(held, work.memory, strict=True))


def schedule(work: Work, rules: Rules) -> Order | None:
    """The order that these rules lead to; None if all ranks come to wait."""
    time, source, hop, rank_of = work.time, work.source, work.hop, work.rank
    takes, frees, due = work.takes, work.frees, pattern(work, rules)
    period, reach = rules.period * work.period, rules.reach * work.period
    microbatches, ranks = work.microbatches, work.placement.ranks
    count, arrivals = [0] * len(time), [list[float]() for _ in time]
    # An F of a stage leaves room for the later stages of its rank, so that the oldest micro-batch
    # can always go on.
    stages_of = [work.placement.stages_of(rank) for rank in range(ranks)]
    choices = [
        [(3 * stage + kind, due[3 * stage + kind]) for stage in stages for kind in (1, 0)]
        for stages in stages_of
    ]
    room = [
        [
            limit * (1 + MARGIN) - sum(takes[3 * later] for later in stages[place + 1 :])
            for place in range(len(stages))
        ]
        for limit, stages in zip(work.memory, stages_of, strict=True)
    ]
    place_of = {stage: place for stages in stages_of for place, stage in enumerate(stages)}
    held = [[0.0] * len(stages) for stages in stages_of]
    pending: list[list[int]] = [[] for _ in range(ranks)]
    next_weight = [0] * ranks
    order: Order = [[] for _ in range(ranks)]
    free, left = [0.0] * ranks, 3 * microbatches * work.placement.stages
    events = [(0.0, rank) for rank in range(ranks)]
    heapify(events)
    while events:
        now, rank = heappop(events)
        if now < free[rank]:
            continue
        chosen = -1
        best = first_due = soonest = math.inf
        blocked = False
        mine = held[rank]
        soon: list[tuple[float, float]] = []
        for letter, at in choices[rank]:
            number = count[letter]
            if number == microbatches:
                continue
            priority = at + number * period
            needs = source[letter]
            if needs >= 0:
                there = arrivals[needs]
                if number >= len(there):
                    if priority < first_due:
                        first_due = priority
                    continue
                if there[number] > now:
                    soon.append((there[number], priority))
                    if there[number] < soonest:
                        soonest = there[number]
                    if priority < first_due:
                        first_due = priority
                    continue
            elif letter % 3 and count[letter - 1] <= number:
                continue
            if not letter % 3:
                fits, total = True, takes[letter]
                for place, limit in enumerate(room[rank]):
                    total += mine[place]
                    if total > limit and place >= place_of[letter // 3]:
                        fits = False
                        break
                if not fits:
                    blocked = True
                    continue
            if priority < first_due:
                first_due = priority
            if priority < best:
                best, chosen = priority, letter
        weights = pending[rank]
        if chosen >= 0:
            if soon:
                # Not in the way of what is due earlier and almost there.
                end = now + (1 - rules.wait) * time[chosen]
                if any(at < end and earlier < best for at, earlier in soon):
                    chosen = -1
            if chosen >= 0 and best > first_due + reach:
                chosen = -1
        if chosen < 0 and next_weight[rank] < len(weights):
            letter = weights[next_weight[rank]]
            if blocked or now + (1 - rules.fill) * time[letter] <= soonest + 1e-9:
                chosen = letter
                next_weight[rank] += 1
        if chosen < 0:
            if soonest < math.inf:
                heappush(events, (soonest, rank))
            continue
        order[rank].append(chosen)
        left -= 1
        kind, place = chosen % 3, place_of[chosen // 3]
        mine[place] += takes[chosen] - frees[chosen]
        end = free[rank] = now + time[chosen]
        heappush(events, (end, rank))
        if kind == 2:
            continue
        count[chosen] += 1
        if kind == 1:
            weights.append(chosen + 1)
        arrivals[chosen].append(end + hop[chosen])
        reader = chosen + (3, -3)[kind]
        if 0 <= reader < len(time) and free[rank_of[reader]] <= end + hop[chosen]:
            heappush(
                events,
                (now if free[rank_of[reader]] <= now else free[rank_of[reader]], rank_of[reader]),
            )
    return None if left else order


def pattern(work: Work, rules: Rules) -> list[float]:
    """When F and I of micro-batch 0 are due, by letter."""
    due, time, hop = [0.0] * len(work.time), work.time, work.hop
    for letter in range(3, len(due), 3):
        due[letter] = due[letter - 3] + rules.down * (time[letter - 3] + hop[letter - 3])
    due[-2] = due[-3] + time[-3] + rules.turn * work.period
    for letter in range(len(due) - 5, 0, -3):
        due[letter] = due[letter + 3] + rules.up * (time[letter + 3] + hop[letter + 3])
    return due
