"""Plans and timelines in a terminal: one row per rank, readable without colour."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TypeAlias

import numpy as np

from taktline.checks import check
from taktline.plan.action import COPIES, Kind, Overlap
from taktline.plan.plan import Level, Plan
from taktline.plan.rows import FloatArray
from taktline.plan.timeline import Timeline
from taktline.plan.validate import validate
from taktline.plan.walk import unit_run
from taktline.render.svg import MEANINGS, nice_ticks, shared_axis
from taktline.text import counted, memory_text

_MOST_RANKS = 64
_MOST_BLOCKS = 4
_ANSI = {
    **{Kind.F: "97;44", Kind.RECOMPUTE: "97;45", Kind.B: "30;42", Kind.I: "30;46", Kind.W: "30;43"},
    **{Kind.OFFLOAD: "30;47", Kind.RELOAD: "97;41"},
}
_COPIES = {Kind.OFFLOAD: "   out", Kind.RELOAD: "  back"}

Kinds: TypeAlias = tuple[Kind, ...]
"""Of an action: one, two for an overlapped pair, none if it does not compute."""
_Line: TypeAlias = list[tuple[str, Kind | None]]
"""Characters, each with the kind of action whose colour it gets."""


def _line(text: str, kinds: Kinds = ()) -> _Line:
    """A text in the colours of its kinds; an overlapped pair gets its two half and half."""
    return [
        (character, kinds[at * len(kinds) // len(text)] if kinds else None)
        for at, character in enumerate(text)
    ]


def _shown(line: _Line, colour: bool) -> str:
    if not colour:
        return "".join(character for character, _ in line).rstrip()
    runs = groupby(line, key=lambda cell: cell[1])
    return "".join(_painted("".join(character for character, _ in run), kind) for kind, run in runs)


def _painted(text: str, kind: Kind | None) -> str:
    return text if kind is None else f"\x1b[{_ANSI[kind]}m{text}\x1b[0m"


def grid(plan: Plan, width: int | None = None) -> str:
    """A plan by step: to scale at unit cost if it is a sound compute plan, else in plain order.

    Copies take no part in steps, so a plan with copies is drawn in order.

    ``width`` defaults to that of the terminal; what does not fit goes into further blocks.

    >>> from taktline.plan import build
    >>> print(grid(build("1f1b", ranks=2, microbatches=2), width=60))
    1f1b: 2 ranks × 1 stage, 2 micro-batches
    rank 0 │ 0F0 0F1         0B0────     0B1────
    rank 1 │     1F0 1B0──── 1F1 1B1────
    """
    ranks = range(min(plan.ranks, _MOST_RANKS))
    by_step = plan.level == Level.COMPUTE and not plan.has(*COPIES)
    if by_step and not validate(plan):
        run = unit_run(plan)
        rows = [_boxes(plan, rank, run.start, run.arrival) for rank in ranks]
    else:
        actions = ([*_actions(plan, rank)] for rank in ranks)
        rows = [[(*each[:2], at, at + 1) for at, each in enumerate(row)] for row in actions]
    widths = [math.ceil((len(text) + 1) / (end - at)) for row in rows for text, _, at, end in row]
    unit = max(widths, default=1)
    longest = round(unit * max((row[-1][-1] for row in rows if row), default=0))
    lines = [_drawn(row, unit, longest, idle=" ", filled_from=2) for row in rows]
    label = _label_width(plan)
    room = max(1, (_width(width) - label) // unit) * unit
    blocks = range(0, longest, room)
    parts = [f"{plan.name}: {plan.placement.shape}, {counted(plan.microbatches, 'micro-batch')}"]
    if not by_step:
        parts[0] += f", {plan.level.name.lower()}, in order"
    for at in blocks[:_MOST_BLOCKS]:
        parts += [""] if at else []
        parts += [
            (_label(rank, label) + _shown(line[at : at + room], False)).rstrip()
            for rank, line in enumerate(lines)
        ]
    if len(blocks) > _MOST_BLOCKS:
        steps = counted((longest - _MOST_BLOCKS * room) // unit, "step")
        parts.append(f"… {steps} more; write the plan to a .csv or .json file to see all")
    return "\n".join([*parts, *_hidden_ranks(plan)])


def chart(timelines: Sequence[Timeline], width: int | None = None, *, colour: bool = False) -> str:
    """Timelines to scale, below each other on one time axis that fits the width.

    >>> from taktline.plan import build, simulate
    >>> print(chart([simulate(build("1f1b", ranks=2, microbatches=2))], width=60))
    1f1b: makespan 9, bubble 33.3% (no plan below 14.3%), peak memory 2 micro-batches
    rank 0 │ 0F0── 0F1─ ···········0B0─────── ······0B1───────
    rank 1 │ ······1F0─ 1B0─────── 1F1── 1B1─────── ···········
             0          2          4          6          8
    """
    if width is not None:
        width = check("width", width, int, least=1, most=10_000)
    check("colour", colour, bool)
    makespan, unit = shared_axis(timelines)
    label = max(_label_width(timeline.plan) for timeline in timelines)
    columns = max(8, _width(width) - label - 1)
    parts: list[str] = []
    for timeline in timelines:
        plan, bound = timeline.plan, timeline.bound
        least = f" (no plan below {bound.bubble_of_makespan:.1%})" if bound else ""
        parts += [""] * bool(parts)
        parts.append(
            f"{timeline.name}: makespan {f'{timeline.makespan:.5g} {unit}'.strip()}, "
            f"bubble {timeline.bubble():.1%}{least}, "
            f"peak memory {_peak(timeline)}"
        )
        ranks = range(min(plan.ranks, _MOST_RANKS))
        rows = [_boxes(plan, rank, timeline.start, timeline.end) for rank in ranks]
        rows = _labelled([[box for box in row if box[1]] for row in rows], columns / makespan)
        length = round(timeline.makespan * columns / makespan)
        for rank, row in enumerate(rows):
            line = _drawn(row, columns / makespan, length, idle="·", filled_from=0)
            parts.append(_label(rank, label) + _shown(line[: columns + 1], colour))
            for kind, name in _COPIES.items() if plan.has(*COPIES) else ():
                copies = _drawn(_copies(timeline, rank, kind), columns / makespan, length)
                parts.append(f"{name:<{label - 3}} │ " + _shown(copies[: columns + 1], colour))
        parts += _hidden_ranks(plan)
    return "\n".join([*parts, " " * label + _axis(makespan, columns)])


def _peak(timeline: Timeline) -> str:
    unit = timeline.costs.memory_unit
    text = memory_text(float(timeline.peak_memory.max(initial=0.0)), unit)
    return text if unit == "bytes" else f"{text} {unit.removesuffix('es') if text == '1' else unit}"


_Box: TypeAlias = tuple[str, Kinds, float, float]
"""(text, kinds, start, end) of an action."""


def _boxes(plan: Plan, rank: int, start: FloatArray, end: FloatArray) -> list[_Box]:
    return [(text, kinds, start[row], end[row]) for text, kinds, row in _actions(plan, rank)]


def _copies(timeline: Timeline, rank: int, kind: Kind) -> Iterable[_Box]:
    """What a rank copies in one direction, by stage and micro-batch."""
    rows, first = timeline.plan.rows_of(rank), int(timeline.plan.offsets[rank])
    for at in np.flatnonzero(rows.kind == kind).tolist():
        text = f"{rows.stage[at]}F{rows.microbatch[at]}"
        yield text, (kind,), timeline.start[first + at], timeline.end[first + at]


def _drawn(
    boxes: Iterable[_Box], scale: float, length: int, *, idle: str = " ", filled_from: int = 0
) -> _Line:
    """A line of boxes to scale; their text is filled up with a line from so many units on."""
    line = _line(idle * length)
    for text, kinds, start, end in boxes:
        first, last = round(start * scale), round(end * scale)
        room = max(1, last - first - 1)
        fill = "─" if end - start >= filled_from else " "
        box = _line(text[:room].ljust(room, fill), kinds) + _line(" ") * (last - first > 1)
        line[first : max(last, first + 1)] = box
    return line


def _labelled(rows: list[list[_Box]], scale: float) -> list[list[_Box]]:
    """The boxes with the longest kind of label that fits into all: ``3F7``, ``F7`` or ``F``."""

    def fits(style: int) -> bool:
        return all(
            len(_labels(text)[style]) < int((end - start) * scale)
            for row in rows
            for text, _, start, end in row
        )

    style = next(filter(fits, (0, 1)), 2)
    return [
        [(_labels(text)[style], kinds, start, end) for text, kinds, start, end in row]
        for row in rows
    ]


def _labels(text: str) -> tuple[str, str, str]:
    """The labels of a box, the longest first: ``3F7``, ``F7``, ``F``; for a pair at last ``&``."""
    short = re.sub(r"\d+([A-Z])", r"\1", text)
    return text, short, "&" if "&" in text else short[0]


def _axis(makespan: float, columns: int) -> str:
    line = " " * (columns + 1)
    for tick in nice_ticks(makespan, columns / 8):
        at, text = round(tick / makespan * columns), f"{tick:g}"
        if at + len(text) <= len(line):
            line = line[:at] + text + line[at + len(text) :]
    return line.rstrip()


def legend(timelines: Sequence[Timeline] = (), *, colour: bool = False) -> str:
    """The kinds of actions in their colours: those of any plan, and the others that these have."""
    names = {kind: kind.name for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
    names |= {Kind.RECOMPUTE: "R"} | {kind: name.strip() for kind, name in _COPIES.items()}
    always = (Kind.F, Kind.B, Kind.I, Kind.W)
    return "  ".join(
        f"{_painted(f' {name} ', kind) if colour else name} {MEANINGS[kind]}"
        for kind, name in names.items()
        if kind in always or any(each.plan.has(kind) for each in timelines)
    )


def _actions(plan: Plan, rank: int) -> Iterable[tuple[str, Kinds, int]]:
    """(text, kinds, row) of each action."""
    first, rows = int(plan.offsets[rank]), plan.rows_of(rank)
    at = np.flatnonzero(~rows.second_of_pair()).tolist()
    for place, action in zip(at, rows.actions(), strict=True):
        if isinstance(action, Overlap):
            kinds = (action.forward.kind, action.backward.kind)
            yield f"{action.forward}&{action.backward}", kinds, first + place
        else:
            text = str(action).replace("RECOMPUTE", "R")
            yield text, (action.kind,) if action.kind.is_compute else (), first + place


def _width(asked: int | None) -> int:
    return asked or shutil.get_terminal_size((120, 24)).columns


def _label_width(plan: Plan) -> int:
    return len(f"rank {min(plan.ranks, _MOST_RANKS) - 1} │ ")


def _label(rank: int, width: int) -> str:
    return f"{f'rank {rank}':<{width - 3}} │ "


def _hidden_ranks(plan: Plan) -> list[str]:
    hidden = plan.ranks - _MOST_RANKS
    return [f"… {counted(hidden, 'rank')} more"] if hidden > 0 else []
