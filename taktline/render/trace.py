"""Timelines as Chrome trace events, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from taktline.plan.action import COPIES, Kind
from taktline.plan.memory import memory_curve
from taktline.plan.plan import Plan
from taktline.plan.timeline import Timeline
from taktline.render.svg import MEANINGS

_MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0, "µs": 1.0, "ns": 1e-3}


def to_trace(timelines: Sequence[Timeline]) -> str:
    """The timelines as a trace: a process for each, a thread for each rank, arrows for messages.

    A unit of time that is not one of s, ms, us or ns is shown as a millisecond.

    >>> from taktline.plan import build, simulate
    >>> trace = json.loads(to_trace([simulate(build("1f1b", ranks=2, microbatches=1))]))
    >>> [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    ['0F0', '0B0', '1F0', '1B0']
    """
    events = [
        event
        for process, timeline in enumerate(timelines)
        for part in (_names, _slices, _flows, _memory)
        for event in part(timeline, process)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(timeline: Timeline, process: int) -> Iterator[dict[str, Any]]:
    plan = timeline.plan
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": timeline.name}}
    for rank in range(plan.ranks):
        thread = {"ph": "M", "pid": process, "tid": rank}
        yield thread | {"name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield thread | {"name": "thread_sort_index", "args": {"sort_index": rank}}
    for rank in range(plan.ranks) if plan.has(*COPIES) else ():
        for kind in COPIES:
            thread = {"ph": "M", "pid": process, "tid": _thread(plan, rank, kind)}
            name = f"rank {rank}: {MEANINGS[kind]}"
            yield thread | {"name": "thread_name", "args": {"name": name}}
            yield thread | {"name": "thread_sort_index", "args": {"sort_index": rank}}


def _thread(plan: Plan, rank: int, kind: Kind) -> int:
    """Copies have threads of their own, as they overlap what their rank computes."""
    return rank if kind not in COPIES else plan.ranks + 2 * rank + COPIES.index(kind)


def _slices(timeline: Timeline, process: int) -> Iterator[dict[str, Any]]:
    """What computes or takes time; the halves of an overlapped pair are one slice."""
    plan, rows, scale = timeline.plan, timeline.plan.rows, _scale(timeline)
    rank, held_by, second = plan.rank_of_rows(), timeline.held_by, rows.second_of_pair()
    for row in range(len(rows)):
        lasts = float(timeline.end[row] - timeline.start[row])
        if second[row] or (rows.kind[row] > Kind.W and not lasts):
            continue
        leaf = rows.leaf(row)
        name = f"{leaf}&{rows.leaf(row + 1)}" if rows.joined[row] else str(leaf)
        arguments: dict[str, Any] = {"stage": leaf.stage, "micro-batch": leaf.microbatch}
        if held_by[row] >= 0:
            arguments["held up by"] = str(rows.leaf(int(held_by[row])))
        yield {
            "ph": "X",
            "pid": process,
            "tid": _thread(plan, int(rank[row]), leaf.kind),
            "name": name,
            "cat": leaf.kind.name,
            "ts": float(timeline.start[row]) * scale,
            "dur": lasts * scale,
            "args": arguments,
        }


def _flows(timeline: Timeline, process: int) -> Iterator[dict[str, Any]]:
    """An arrow from the action whose result is sent to the one that uses it on another rank."""
    rows, scale, rank = timeline.plan.rows, _scale(timeline), timeline.plan.rank_of_rows()
    sources, targets = timeline.messages()
    # An arrow starts inside of a slice, whose end is no longer part of it.
    leaves = timeline.start + 0.999 * (timeline.end - timeline.start)
    for number, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        gradient = rows.kind[target] != Kind.F
        arrow = {
            "pid": process,
            "id": process << 32 | number,
            "name": "gradient" if gradient else "activation",
            "cat": "message",
        }
        yield arrow | {"ph": "s", "tid": int(rank[source]), "ts": float(leaves[source]) * scale}
        begin = float(timeline.start[target]) * scale
        yield arrow | {"ph": "f", "bp": "e", "tid": int(rank[target]), "ts": begin}


def _memory(timeline: Timeline, process: int) -> Iterator[dict[str, Any]]:
    plan, rows, scale = timeline.plan, timeline.plan.rows, _scale(timeline)
    rank, unit = plan.rank_of_rows(), timeline.costs.memory_unit
    during, after = memory_curve(plan, timeline.costs)
    for row in np.flatnonzero(rows.kind <= Kind.W).tolist():
        counter = {"ph": "C", "pid": process, "name": f"memory of rank {rank[row]}, in {unit}"}
        for time, level in ((timeline.start, during), (timeline.end, after)):
            yield counter | {"ts": float(time[row]) * scale, "args": {"live": float(level[row])}}


def _scale(timeline: Timeline) -> float:
    """Microseconds, which trace events count in, for one unit of the timeline's time."""
    return _MICROSECONDS.get(timeline.costs.unit, 1e3)
