"""Timelines as one self-contained page to explore: zoom, hover, follow a micro-batch.

The page is ``viewer.html`` beside this file, with the timelines put into it as columns of numbers.
It loads nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from taktline.plan.action import Kind
from taktline.plan.deps import needs
from taktline.plan.memory import memory_curve
from taktline.plan.rows import BoolArray, FloatArray, IntArray
from taktline.plan.timeline import Timeline
from taktline.render.svg import COLOURS, MEANINGS, MEMORY, is_dark, shades, shared_axis
from taktline.text import counted


def to_html(timelines: Sequence[Timeline]) -> str:
    """One page for one or several timelines, below each other on one time axis.

    >>> from taktline.plan import build, simulate
    >>> page = to_html([simulate(build("1f1b", ranks=4, microbatches=8))])
    >>> page[:15], "://" in page
    ('<!doctype html>', False)
    """
    _, unit = shared_axis(timelines)
    names = [timeline.name for timeline in timelines]
    content = {
        "title": "Timeline" if len(names) == 1 else f"Comparison of {len(names)} timelines",
        "unit": unit,
        "kinds": [kind.name for kind in Kind],
        "meanings": [MEANINGS[kind] for kind in COLOURS],
        "colours": [COLOURS[kind] for kind in COLOURS],
        "timelines": [_timeline(timeline) for timeline in timelines],
    }
    # "<" only ever stands in strings, and as \u003c it can end no script.
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    put = {"{{title}}": escape(", ".join(names)), "{{memory}}": MEMORY, "{{data}}": data}
    template = files("taktline.render").joinpath("viewer.html").read_text("utf-8")
    return re.sub(r"\{\{\w+\}\}", lambda match: put[match[0]], template)


def _timeline(timeline: Timeline) -> dict[str, Any]:
    plan = timeline.plan
    peak, least = timeline.peak_memory, timeline.bound
    colours = list(shades(plan.placement).values())
    return {
        "name": timeline.name,
        "shape": f"{plan.placement.shape} × {counted(plan.microbatches, 'micro-batch')}",
        "ranks": plan.ranks,
        "stages": plan.stages,
        "microbatches": plan.microbatches,
        "colours": colours,
        "light_ink": [[int(is_dark(colour)) for colour in row] for row in colours],
        "makespan": _number(timeline.makespan),
        "bubble": [_number(timeline.bubble()), _number(timeline.bubble("span"))],
        "least": least and [_number(least.bubble_of_makespan), _number(least.bubble)],
        "peak": _numbers(peak),
        "memory_unit": timeline.costs.memory_unit,
        **_columns(timeline),
    }


def _columns(timeline: Timeline) -> dict[str, Any]:
    """The rows that are drawn, rank after rank: all that compute, and what else takes time.

    The two rows of an overlapped pair are one.
    """
    plan, rows = timeline.plan, timeline.plan.rows
    second = rows.second_of_pair()
    drawn = ~second & ((rows.kind <= Kind.W) | (timeline.end > timeline.start))
    item = np.flatnonzero(drawn)
    # A row that is not drawn counts to the one before it, and so does the second of a pair.
    item_of_row = np.cumsum(drawn) - 1
    last = item + rows.joined[item]
    source, late = _sources(timeline, item, drawn | second)
    during, after = memory_curve(plan, timeline.costs)
    critical = [row for row in timeline.critical_rows() if drawn[row] or second[row]]
    pairs = np.flatnonzero(rows.joined[item])
    partner = item[pairs] + 1
    return {
        "offsets": np.searchsorted(item, plan.offsets).tolist(),
        "kind": rows.kind[item].tolist(),
        "stage": rows.stage[item].tolist(),
        "microbatch": rows.microbatch[item].tolist(),
        "start": _numbers(timeline.start[item]),
        "lasts": _numbers((timeline.end - timeline.start)[item]),
        "held": np.where(source >= 0, item_of_row[source], -1).tolist(),
        "late": _numbers(late) if late.any() else None,
        "during": _numbers(during[last]),
        "after": _numbers(after[last]),
        "pairs": {
            "item": pairs.tolist(),
            "kind": rows.kind[partner].tolist(),
            "stage": rows.stage[partner].tolist(),
            "microbatch": rows.microbatch[partner].tolist(),
        },
        "critical": item_of_row[critical].tolist() if critical else [],
    }


def _sources(timeline: Timeline, item: IntArray, drawn: BoolArray) -> tuple[IntArray, FloatArray]:
    """For each item, the drawn row that held it up, or -1; and how long its message took."""
    plan, rank = timeline.plan, timeline.plan.rank_of_rows()
    source = timeline.held_by[item]
    elsewhere = (source >= 0) & (rank[source] != rank[item])
    late = np.zeros(len(item))
    # What arrives from another rank comes from an action, also where the plan spells out its SEND.
    sent = elsewhere & (plan.rows.kind[source] > Kind.W)
    origin = np.where(sent, needs(plan).own[source], source)
    late[elsewhere] = (timeline.arrivals[source] - timeline.end[origin])[elsewhere]
    source = np.where(elsewhere, origin, source)
    # An action that takes no time is replaced by the one that it waited for itself.
    while (skip := (source >= 0) & ~drawn[source]).any():
        source = np.where(skip, timeline.held_by[source], source)
    return source, np.maximum(late, 0.0)


def _numbers(values: FloatArray) -> list[float]:
    return list(map(_number, values.tolist()))


def _number(value: float) -> float:
    """With 7 significant digits, and no more characters than they need."""
    value = float(f"{value:.7g}")
    return int(value) if value.is_integer() else value
