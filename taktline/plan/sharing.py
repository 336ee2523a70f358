"""Ranks that share cores: several processes on few cores, or on one GPU that takes turns.

While more ranks compute than there are cores, each of them is slower. So a plan is simulated from
event to event; and in a measured timeline, an action counts for as long as it had a core.

A rank that waits in a receive of nccl does not sleep: it spins, and takes its turns on the GPU like
one that computes, until its step ends. So all have the same pace at any time. Costs are then those
beside all ranks, and a step is simulated with these; only its end is quicker.
"""

from __future__ import annotations

import math

import numpy as np

from taktline.plan.action import Kind
from taktline.plan.costs import Costs
from taktline.plan.deps import channels, needs
from taktline.plan.plan import Plan
from taktline.plan.rows import FloatArray, Rows
from taktline.plan.timeline import Timeline, simulate


def predict(
    plan: Plan, costs: Costs, cores: float = math.inf, *, spinning: bool = False
) -> Timeline:
    """The step as it runs: no two actions overlap, and an I with its W is one backward.

    That is so where nothing lies between them, not even the message with the result of I.
    With ``spinning``, a rank slows the others until its step ends, and costs are beside all ranks.

    >>> from taktline.plan import build
    >>> plan = build("1f1b", ranks=2, microbatches=4)
    >>> predict(plan, Costs()).makespan, predict(plan, Costs(), cores=1).makespan
    (15.0, 24.0)
    >>> predict(plan, Costs(), spinning=True).makespan  # rank 1 ends at 13
    14.0
    """
    by_rank = [plan.rows_of(rank) for rank in range(plan.ranks)]
    plain = [rows[rows.kind <= Kind.RELOAD] for rows in by_rank]
    plain = [Rows.of(rows.kind, rows.stage, rows.microbatch) for rows in plain]
    plan = Plan(plain, plan.placement, plan.microbatches, name=plan.name)
    if costs.backward is not None:
        plan = _with_whole_backwards(plan)
    if spinning:
        return _quicker_at_the_end(simulate(plan, costs))
    return simulate(plan, costs) if cores >= plan.ranks else _shared(plan, costs, cores)


def _quicker_at_the_end(timeline: Timeline) -> Timeline:
    """The same, but each rank that has ended makes the others quicker."""
    start, end, arrival = _paced(timeline, timeline.start, timeline.end, timeline.arrivals, by=1)
    return Timeline(timeline.plan, start, end, timeline.costs, arrival)


def _paced(timeline: Timeline, *times: FloatArray, by: int) -> list[FloatArray]:
    """Times at the pace of ranks that share a GPU until they end: 1 of it is there for all.

    From what costs beside all ranks say to how it runs (``by=1``), and back (``by=-1``).
    """
    by_rank = np.split(timeline.end, timeline.plan.offsets[1:-1])
    ends = np.sort([0.0, *(each.max(initial=0.0) for each in by_rank)])
    shares = np.arange(len(by_rank), 0, -1) / len(by_rank)
    passed = np.append(0.0, np.cumsum(np.diff(ends) * shares**by))
    return [np.interp(each, ends, passed) for each in times]


def _with_whole_backwards(plan: Plan) -> Plan:
    """The plan with a B for each I that sends nothing, and is followed by its W."""
    rows, sends = plan.rows, channels(plan) >= 0
    same = (rows.stage[:-1] == rows.stage[1:]) & (rows.microbatch[:-1] == rows.microbatch[1:])
    halves = (rows.kind[:-1] == Kind.I) & (rows.kind[1:] == Kind.W)
    first = np.append(same & halves & ~sends[:-1], False)
    kind, second = np.where(first, Kind.B, rows.kind), np.roll(first, 1)
    rank = plan.rank_of_rows()
    whole = [
        Rows.of(kind, rows.stage, rows.microbatch)[~second & (rank == r)] for r in range(plan.ranks)
    ]
    return Plan(whole, plan.placement, plan.microbatches, name=plan.name)


def _shared(plan: Plan, costs: Costs, cores: float) -> Timeline:
    """A simulation in which ranks compute more slowly while more of them do than there are cores.

    Each rank runs its next action once what it needs is there; messages of a channel go one after
    the other.
    """
    left, waits, channel = costs.durations(plan), needs(plan).waits.tolist(), channels(plan)
    letter = ((plan.rows.kind != Kind.F).astype(np.int8), plan.rows.stage)
    occupies, flight = (table[letter] for table in costs.messages(plan.placement))
    start, end, arrival = np.full((3, len(left)), math.inf)
    row, ends = plan.offsets[:-1].tolist(), plan.offsets[1:].tolist()
    free = dict.fromkeys(channel.tolist(), 0.0)
    running: dict[int, float] = {}  # the row of each rank that computes, and what is left of it
    now = 0.0
    while True:
        soonest = math.inf  # the next message that a rank waits for
        for rank, next_row in enumerate(row):
            if next_row in running or next_row >= ends[rank]:
                continue
            ready = 0.0 if waits[next_row] < 0 else float(arrival[waits[next_row]])
            if ready <= now:
                running[next_row], start[next_row] = float(left[next_row]), now
            soonest = min(soonest, ready if ready > now else math.inf)
        pace = min(1.0, cores / max(1, len(running)))
        step = min(min(running.values(), default=math.inf) / pace, soonest - now)
        if step == math.inf:
            return Timeline(plan, start, end, costs, arrival)
        now += step
        running = {each: much - step * pace for each, much in running.items()}
        for done in [each for each, much in running.items() if much <= _NOTHING * now]:
            del running[done]
            row[int(np.searchsorted(plan.offsets, done, "right")) - 1] += 1
            line = int(channel[done])
            end[done] = arrival[done] = now
            if line >= 0:
                free[line] = max(now, free[line]) + occupies[done]
                arrival[done] = free[line] + flight[done]


_NOTHING = 1e-12
"""The part of the time by which sums of it are rounded."""


def work(timeline: Timeline, cores: float = math.inf, *, spinning: bool = False) -> FloatArray:
    """How long each row had a core: from when its rank was free, and its input there, to its end.

    With ``spinning``, how long it would have taken beside all ranks.

    >>> from taktline.plan import build
    >>> slow = predict(build("1f1b", ranks=2, microbatches=4), Costs(), cores=1)
    >>> print(work(slow).max(), work(slow, cores=1).max())
    4.0 2.0
    """
    begin, end = occupied(timeline)
    if spinning:
        begin, end = _paced(timeline, begin, end, by=-1)
        return end - begin
    times = np.concatenate([begin, end])
    order = np.argsort(times, kind="stable")
    times = times[order]
    active = np.cumsum(np.repeat([1, -1], len(begin))[order])
    pace = np.minimum(1.0, cores / np.maximum(active, 1))
    passed = np.concatenate([[0.0], np.cumsum(np.diff(times) * pace[:-1])])
    return np.interp(end, times, passed) - np.interp(begin, times, passed)


def occupied(timeline: Timeline) -> tuple[FloatArray, FloatArray]:
    """From when to when each row occupied its rank, without its wait for a message.

    What lies between two actions of a rank, such as what Python does, is part of the later one.
    """
    plan, start, end = timeline.plan, timeline.start, timeline.end
    ready = np.roll(end, 1)
    first = plan.offsets[:-1][np.diff(plan.offsets) > 0]
    ready[first] = start[first]
    source = needs(plan).waits
    ready = np.where(source >= 0, np.maximum(ready, timeline.arrivals[source]), ready)
    # Clocks differ a little, so a message may seem to arrive after its receiver has started.
    return np.minimum(ready, start), end
