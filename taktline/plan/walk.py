"""Runs a plan's rows in order on every rank, each as soon as its input has arrived.

The proof of freedom from deadlock, the placement of communication, and the simulation are all this
one walk, with different waits and durations.

Only the rows that wait for another rank are visited one by one: between two such **stops**, a rank
goes on at a pace that is known beforehand. Each rank runs until it blocks, and is woken by the rank
that it waits for, so the walk is linear in the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from taktline.plan.action import COPIES, Kind
from taktline.plan.deps import Needs, needs
from taktline.plan.plan import Plan
from taktline.plan.rows import FloatArray, IntArray

_UNIT = np.zeros(len(Kind))
_UNIT[[Kind.F, Kind.RECOMPUTE, Kind.B, Kind.I, Kind.W]] = 1, 1, 2, 1, 1


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """When each row started, when its result arrived, and where ranks never went on."""

    start: FloatArray
    arrival: FloatArray
    blocked: dict[int, int]
    """The next row of each rank that did not finish; what this row waits for never comes."""


def unit_run(plan: Plan, needed: Needs | None = None) -> Walk:
    """The plan with F, I and W taking 1, B taking 2 and nothing else any time; made once a plan."""
    if "unit_run" not in plan.known:
        hold = _UNIT[plan.rows.kind]
        hold[plan.rows.joined] += hold[plan.rows.second_of_pair()]
        plan.known["unit_run"] = walk(plan, (needed or needs(plan)).waits, hold)
    return cast(Walk, plan.known["unit_run"])


def walk(
    plan: Plan,
    waits: IntArray,
    hold: FloatArray,
    *,
    channel: IntArray | int = 0,
    occupies: FloatArray | float = 0.0,
    delay: FloatArray | float = 0.0,
    copy: IntArray | None = None,
) -> Walk:
    """Run all rows: row i once row ``waits[i]`` (if any) has arrived; it then holds its rank.

    The rows of an overlapped pair start together, once both may, and end together, after the
    first one's ``hold``. A row's result ``occupies`` its channel for a while, which carries one
    after the other, and arrives with this ``delay``. Row i also waits for row ``copy[i]``, before
    it on its rank, whose result is a copy in a channel of its own.
    """
    rows, count = plan.rows, len(plan.rows)
    # A pair is walked as one: the time passes in its second row, and rows that wait for its first
    # wait for the second.
    first, second = np.flatnonzero(rows.joined), np.flatnonzero(rows.second_of_pair())
    done_with = np.arange(count)
    done_with[first] = second
    hold = hold.copy()
    hold[second], hold[first] = hold[first], 0.0
    occupies = np.broadcast_to(occupies, count)
    queued = occupies > 0
    if copy is not None:
        queued |= np.isin(rows.kind, COPIES)

    first_rows = plan.offsets[:-1][np.diff(plan.offsets) > 0]
    is_stop = queued | (waits >= 0)
    if copy is not None:
        is_stop |= copy >= 0
        is_stop[1:] |= queued[:-1]  # what comes after a copy does not wait for it
    is_stop[first_rows] = True
    stops, stop_of = np.flatnonzero(is_stop), np.cumsum(is_stop) - 1
    # Times as if no rank ever waited, counted from the last stop.
    pace = np.cumsum(hold) - hold
    since_stop = pace - pace[stops][stop_of]
    ends_after = (since_stop + hold)[done_with]

    gap = np.diff(pace[stops], prepend=0.0)
    gap[stop_of[first_rows]] = 0.0
    waited_for = waits[stops]
    ends = np.searchsorted(stops, plan.offsets).tolist()
    passed, sent, reached = _pass_stops(
        ends,
        gap.tolist(),
        np.where(waited_for >= 0, stop_of[done_with[waited_for]], -1).tolist(),
        (ends_after + delay)[waited_for].tolist(),
        np.where(queued, channel, -1)[stops].tolist(),
        occupies[stops].tolist(),
        hold[stops].tolist(),
        [] if copy is None else np.where(copy >= 0, stop_of[copy], -1)[stops].tolist(),
    )
    start = np.array(passed)[stop_of] + since_stop
    start[first] = start[second]
    arrival = np.array(sent)[stop_of[done_with]] + ends_after + delay
    blocked = {rank: int(stops[stop]) for rank, stop in enumerate(reached) if stop < ends[rank + 1]}
    return Walk(start, arrival, blocked)


def _pass_stops(
    ends: list[int],
    gap: list[float],
    target: list[int],
    lag: list[float],
    channel: list[int],
    occupies: list[float],
    holds: list[float],
    copy: list[int],
) -> tuple[list[float], list[float], list[int]]:
    """The walk over the stops of all ranks: the one loop in pure Python.

    Args:
        ends: rank r has the stops from ``ends[r]`` up to ``ends[r + 1]``.
        gap: the time from a rank's stop to its next, if that one has not to wait.
        target: the stop that must have been passed for this one, or -1.
        lag: the time from that stop until its result arrives.
        channel: the channel in which its message has to queue, or -1.
        occupies: how long the message takes its channel.
        holds: how long the stop holds its rank.
        copy: the stop before on this rank whose result must have arrived, or -1; empty if none has.

    Returns:
        When each stop was passed; the same, but later where its message had to queue; and for each
        rank the stop that it could not pass.
    """
    ranks = len(ends) - 1
    start, sent = [-1.0] * len(gap), [-1.0] * len(gap)
    free_from = dict.fromkeys(channel, 0.0)
    # The ranks that wait for a stop form a chain: each rank waits for one stop only.
    chain_of_stop = [-1] * len(gap)
    next_in_chain = [-1] * ranks
    reached, clock = ends[:-1], [0.0] * ranks
    ready = list(range(ranks - 1, -1, -1))
    while ready:
        rank = ready.pop()
        stop, end, now = reached[rank], ends[rank + 1], clock[rank]
        while stop < end:
            time = now + gap[stop]
            source = target[stop]
            if source >= 0:
                there = sent[source]
                if there < 0.0:
                    next_in_chain[rank], chain_of_stop[source] = chain_of_stop[source], rank
                    break
                there += lag[stop]
                if there > time:
                    time = there
            if copy and copy[stop] >= 0 and sent[copy[stop]] > time:
                time = sent[copy[stop]]
            start[stop] = now = time
            if channel[stop] >= 0:
                leaves = max(free_from[channel[stop]], time + holds[stop])
                free_from[channel[stop]] = leaves = leaves + occupies[stop]
                time = leaves - holds[stop]
            sent[stop] = time
            waiter = chain_of_stop[stop]
            while waiter >= 0:
                ready.append(waiter)
                waiter = next_in_chain[waiter]
            stop += 1
        reached[rank], clock[rank] = stop, now
    return start, sent, reached
