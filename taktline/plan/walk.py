"""Runs a plan's rows in order on every rank, each as soon as its input has arrived.

The proof of freedom from deadlock, the placement of communication, and the simulation are all this
one walk, with different waits and durations.

Only the rows that wait for another rank are visited one by one: between two such **stops**, a rank
goes on at a pace that is known beforehand. Each rank runs until it blocks, and is woken by the rank
that it waits for, so the walk is linear in the number of rows. If there are many ranks, all of them
pass their next stop at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, cast

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
    if "unit_run" in plan.known:
        return cast(Walk, plan.known["unit_run"])
    hold = _UNIT[plan.rows.kind]
    hold[plan.rows.joined] += hold[plan.rows.second_of_pair()]
    run = walk(plan, (needed or needs(plan)).waits, hold)
    if len(plan.rows) < _LARGE:
        plan.known["unit_run"] = run
    return run


_LARGE = 2**22
"""The runs of plans with so many rows are not kept: they take more memory than the plan."""


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
    rows = plan.rows
    # A pair is walked as one: the time passes in its second row, and rows that wait for its first
    # wait for the second.
    first = np.flatnonzero(rows.joined)
    second = first + 1
    if len(first):
        hold = hold.copy()
        hold[second], hold[first] = hold[first], 0.0
    queued = np.broadcast_to(occupies, len(rows)) > 0 if np.any(occupies) else None
    if copy is not None:
        copies = np.isin(rows.kind, COPIES)
        queued = copies if queued is None else queued | copies

    is_stop = waits >= 0
    if queued is not None:
        is_stop |= queued
    if copy is not None and queued is not None:
        is_stop |= copy >= 0
        is_stop[1:] |= queued[:-1]  # what comes after a copy does not wait for it
    first_rows = plan.offsets[:-1][np.diff(plan.offsets) > 0]
    is_stop[first_rows] = True
    stops, stop_of = np.flatnonzero(is_stop).astype(np.int32), np.cumsum(is_stop, dtype=np.int32)
    stop_of -= 1
    # Times as if no rank ever waited, counted from the last stop.
    since_stop = np.cumsum(hold) - hold
    at_stop = since_stop[stops]
    since_stop -= at_stop[stop_of]
    gap = np.diff(at_stop, prepend=0.0)
    gap[stop_of[first_rows]] = 0.0
    del at_stop, is_stop
    after = since_stop + hold
    after[first] = after[second]
    after += delay

    waited_for = waits[stops]
    target = stop_of[waited_for]
    target[waited_for < 0] = -1
    if len(first):
        second_stop = np.flatnonzero((waited_for >= 0) & rows.joined[waited_for])
        target[second_stop] = stop_of[waited_for[second_stop] + 1]
    ways = _Ways(np.searchsorted(stops, plan.offsets), gap, target, after[waited_for])
    del gap, target, waited_for
    if queued is not None:
        lines = np.where(queued, channel, -1).astype(np.int32, copy=False)
        ways.queue = _Queue(stops, lines, np.broadcast_to(occupies, len(rows)), hold)
    if copy is not None:
        ways.copy = np.where(copy >= 0, stop_of[copy], -1)[stops]
    passed, sent, reached = (_together if plan.ranks >= _MANY else _one_by_one)(ways)
    behind = np.flatnonzero(reached < ways.ends[1:])
    blocked = dict(zip(behind.tolist(), stops[reached[behind]].tolist(), strict=True))
    del ways, stops

    since_stop += passed[stop_of]
    since_stop[first] = since_stop[second]
    stop_of[first] = stop_of[second]
    after += sent[stop_of]
    return Walk(since_stop, after, blocked)


_MANY = 48
"""From so many ranks on, moving all of them at once is quicker than one by one."""


@dataclass(slots=True, eq=False)
class _Ways:
    """The stops of all ranks, rank after rank, as columns."""

    ends: IntArray
    """Rank r has the stops from ``ends[r]`` up to ``ends[r + 1]``."""
    gap: FloatArray
    """The time to this stop from the one before on its rank, if there is nothing to wait for."""
    target: IntArray
    """The stop that must have been passed for this one, or -1."""
    lag: FloatArray
    """The time from that stop until its result arrives."""
    queue: _Queue | None = None
    """The queues of messages, if any has to queue."""
    copy: IntArray | None = None
    """The stop before on this rank whose result must have arrived, or -1; None if none has."""


@dataclass(frozen=True, slots=True, eq=False)
class _Queue:
    """How messages queue, by rows."""

    row: IntArray
    """Of each stop, its row."""
    channel: IntArray
    """The channel in which it has to, or -1."""
    occupies: FloatArray
    """How long the message takes its channel."""
    holds: FloatArray
    """How long the row holds its rank, before the message."""


_Passed: TypeAlias = tuple[FloatArray, FloatArray, IntArray]
"""When each stop was passed; the same, but later where its message had to queue; and for each
rank the stop that it could not pass."""


def _one_by_one(ways: _Ways) -> _Passed:
    """Each rank runs until it blocks, and is woken by the rank that it waits for."""
    ends, target = cast(list[int], ways.ends.tolist()), cast(list[int], ways.target.tolist())
    gap, lag = ways.gap.tolist(), ways.lag.tolist()
    channel, copy = list[int](), [] if ways.copy is None else cast(list[int], ways.copy.tolist())
    occupies, holds = list[float](), list[float]()
    if ways.queue is not None:
        row = ways.queue.row
        channel = cast(list[int], ways.queue.channel[row].tolist())
        occupies, holds = ways.queue.occupies[row].tolist(), ways.queue.holds[row].tolist()
    ranks = len(ends) - 1
    start = [-1.0] * len(gap)
    sent = [-1.0] * len(gap) if channel else start
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
            if channel:
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
    passed = np.array(start)
    return passed, np.array(sent) if channel else passed, np.array(reached, np.int64)


def _together(ways: _Ways) -> _Passed:
    """All ranks that can pass their next stop do so at once, again and again.

    A channel belongs to the rank that sends, so no two of them queue in the same one.
    """
    gap, target, lag = ways.gap, ways.target, ways.lag
    start = np.full(len(gap), -1.0)
    queue, sent, free_from = ways.queue, start, np.zeros(1)
    if queue is not None:
        sent, free_from = start.copy(), np.zeros(queue.channel.max() + 1)
    reached, clock = ways.ends[:-1].copy(), np.zeros(len(ways.ends) - 1)
    going = np.flatnonzero(reached < ways.ends[1:])
    while len(going):
        at = reached[going]
        source = target[at]
        there = sent[source]
        free = (source < 0) | (there >= 0.0)
        able = going
        if not free.all():
            able, at, source, there = going[free], at[free], source[free], there[free]
            if not len(able):
                break
        time = clock[able] + gap[at]
        time = np.maximum(time, np.where(source < 0, time, there + lag[at]))
        if ways.copy is not None:
            held = ways.copy[at]
            time = np.maximum(time, np.where(held < 0, time, sent[held]))
        start[at] = clock[able] = time
        if queue is not None:
            row = queue.row[at]
            line, holds = queue.channel[row], queue.holds[row]
            leaves = np.maximum(free_from[line], time + holds) + queue.occupies[row]
            free_from[line[line >= 0]] = leaves[line >= 0]
            sent[at] = np.where(line >= 0, leaves - holds, time)
        reached[able] = at + 1
        if (at + 1 == ways.ends[able + 1]).any():
            going = going[reached[going] < ways.ends[going + 1]]
    return start, sent, reached
