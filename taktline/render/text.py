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
from taktline.plan.action import Kind, Overlap
from taktline.plan.plan import Level, Plan
from taktline.plan.timeline import Timeline
from taktline.plan.validate import validate
from taktline.plan.walk import unit_run
from taktline.render.svg import MEANINGS, nice_ticks, shared_axis
from taktline.text import counted

_MOST_RANKS = 64
_MOST_BLOCKS = 4
_ANSI = {Kind.F: "97;44", Kind.B: "30;42", Kind.I: "30;46", Kind.W: "30;43"}

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


def grid(plan: Plan, width: int | None = None, *, colour: bool = False) -> str:
    """A plan by step: to scale at unit cost if it is a sound compute plan, else in plain order.

    ``width`` defaults to that of the terminal; what does not fit goes into further blocks.

    >>> from taktline.plan import build
    >>> print(grid(build("1f1b", ranks=2, microbatches=2), width=60))
    1f1b: 2 ranks × 1 stage, 2 micro-batches
    rank 0 │ 0F0 0F1         0B0────     0B1────
    rank 1 │     1F0 1B0──── 1F1 1B1────
    """
    to_scale = plan.level == Level.COMPUTE and not validate(plan)
    ranks = range(min(plan.ranks, _MOST_RANKS))
    cells = [_steps(plan, rank, to_scale) for rank in ranks]
    unit = max((math.ceil((len(text) + 1) / n) for row in cells for text, n, _ in row), default=1)
    lines = [_grid_line(row, unit) for row in cells]
    label = _label_width(plan)
    room = max(1, (_width(width) - label) // unit) * unit
    longest = max(map(len, lines), default=0)
    blocks = range(0, longest, room)
    parts = [_title(plan)]
    for at in blocks[:_MOST_BLOCKS]:
        parts += [""] if at else []
        parts += [
            (_label(rank, label) + _shown(line[at : at + room], colour)).rstrip()
            for rank, line in enumerate(lines)
        ]
    if len(blocks) > _MOST_BLOCKS:
        steps = counted((longest - _MOST_BLOCKS * room + unit - 1) // unit, "step")
        parts.append(f"… {steps} more; write the plan to a .csv or .json file to see all")
    return "\n".join([*parts, *_hidden_ranks(plan)])


def _title(plan: Plan) -> str:
    parts = [plan.placement.shape, counted(plan.microbatches, "micro-batch")]
    if plan.level != Level.COMPUTE:
        parts.append(f"{plan.level.name.lower()}, in order")
    return f"{plan.name}: {', '.join(parts)}"


_Cell: TypeAlias = tuple[str, int, Kinds]
"""(text, units of time, kinds) of an action or, with an empty text, of a gap."""


def _steps(plan: Plan, rank: int, to_scale: bool) -> list[_Cell]:
    if not to_scale:
        return [(text, 1, kinds) for text, kinds, _ in _actions(plan, rank)]
    run, cells, now = unit_run(plan), list[_Cell](), 0
    for text, kinds, row in _actions(plan, rank):
        start, end = int(run.start[row]), int(run.arrival[row])
        cells += [("", start - now, ())] * (start > now)
        cells.append((text, end - start, kinds))
        now = end
    return cells


def _grid_line(cells: Iterable[_Cell], unit: int) -> _Line:
    """An action of several units fills them with a line; a gap stays blank."""
    line: _Line = []
    for text, count, kinds in cells:
        fill = "─" if text and count > 1 else " "
        line += _line(text.ljust(unit * count - 1, fill), kinds) + _line(" ")
    return line


def chart(timelines: Sequence[Timeline], width: int | None = None, *, colour: bool = False) -> str:
    """Timelines to scale, below each other on one time axis that fits the width.

    >>> from taktline.plan import build, simulate
    >>> print(chart([simulate(build("1f1b", ranks=2, microbatches=2))], width=60))
    1f1b: makespan 9, bubble 33.3%, peak memory 2
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
        plan = timeline.plan
        parts += [""] * bool(parts)
        parts.append(
            f"{timeline.name}: makespan {f'{timeline.makespan:.5g} {unit}'.strip()}, "
            f"bubble {timeline.bubble():.1%}, "
            f"peak memory {timeline.peak_memory.max():.4g}"
        )
        style = _style(timeline, columns / makespan)
        for rank in range(min(plan.ranks, _MOST_RANKS)):
            line = _chart_line(timeline, rank, columns / makespan, style)
            parts.append(_label(rank, label) + _shown(line[: columns + 1], colour))
        parts += _hidden_ranks(plan)
    return "\n".join([*parts, " " * label + _axis(makespan, columns)])


def _chart_line(timeline: Timeline, rank: int, scale: float, style: int) -> _Line:
    """Boxes, each with its label; dots where the rank is idle."""
    line = _line("·" * round(timeline.makespan * scale))
    for text, kinds, row in _actions(timeline.plan, rank):
        if kinds:
            start, end = round(timeline.start[row] * scale), round(timeline.end[row] * scale)
            room = max(1, end - start - 1)
            box = _line(_labels(text)[style][:room].ljust(room, "─"), kinds)
            line[start : max(end, start + 1)] = box + _line(" ") * (end - start > 1)
    return line


def _labels(text: str) -> tuple[str, str, str]:
    """The labels of a box, the longest first: ``3F7``, ``F7``, ``F``; for a pair at last ``&``."""
    short = re.sub(r"\d+([A-Z])", r"\1", text)
    return text, short, "&" if "&" in text else short[0]


def _style(timeline: Timeline, scale: float) -> int:
    """The longest kind of label that fits into all boxes; all of them get the same kind."""
    computes = timeline.plan.rows.kind <= Kind.W
    if (timeline.end - timeline.start)[computes].min(initial=np.inf) * scale < 3:
        return 2  # not even two letters fit; so much is clear without looking at each box
    boxes = [
        (int((timeline.end[row] - timeline.start[row]) * scale) - 1, _labels(text))
        for rank in range(min(timeline.plan.ranks, _MOST_RANKS))
        for text, kinds, row in _actions(timeline.plan, rank)
        if kinds
    ]
    fit = (style for style in (0, 1) if all(len(label[style]) <= room for room, label in boxes))
    return next(fit, 2)


def _axis(makespan: float, columns: int) -> str:
    line = " " * (columns + 1)
    for tick in nice_ticks(makespan, columns / 8):
        at, text = round(tick / makespan * columns), f"{tick:g}"
        if at + len(text) <= len(line):
            line = line[:at] + text + line[at + len(text) :]
    return line.rstrip()


def legend(*, colour: bool = False) -> str:
    """The kinds of actions in their colours."""
    return "  ".join(
        f"{_painted(f' {kind.name} ', kind) if colour else kind.name} {meaning}"
        for kind, meaning in MEANINGS.items()
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
            yield str(action), (action.kind,) if action.kind.is_compute else (), first + place


def _width(asked: int | None) -> int:
    return asked or shutil.get_terminal_size((120, 24)).columns


def _label_width(plan: Plan) -> int:
    return len(f"rank {min(plan.ranks, _MOST_RANKS) - 1} │ ")


def _label(rank: int, width: int) -> str:
    return f"{f'rank {rank}':<{width - 3}} │ "


def _hidden_ranks(plan: Plan) -> list[str]:
    hidden = plan.ranks - _MOST_RANKS
    return [f"… {counted(hidden, 'rank')} more"] if hidden > 0 else []
