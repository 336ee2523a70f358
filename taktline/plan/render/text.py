"""A plan as a text grid: one row a rank, time from left to right."""

from __future__ import annotations

import math
import shutil

import numpy as np

from taktline.plan.plan import Level, Plan
from taktline.plan.validate import validate
from taktline.plan.walk import unit_run
from taktline.plan.words import counted

__all__ = ["grid"]

_MOST_RANKS = 64
_MOST_BLOCKS = 4


def grid(plan: Plan, width: int | None = None) -> str:
    """What each rank does: to scale at unit cost for a sound compute plan, else in plain order.

    ``width`` defaults to that of the terminal; what does not fit goes into further blocks.

    >>> from taktline.plan import build
    >>> print(grid(build("1f1b", ranks=2, microbatches=2), width=60))
    1f1b: 2 ranks × 1 stage, 2 micro-batches
    rank 0 │ 0F0 0F1         0B0────     0B1────
    rank 1 │     1F0 1B0──── 1F1 1B1────
    """
    width = width or shutil.get_terminal_size((120, 24)).columns
    to_scale = plan.level == Level.COMPUTE and not validate(plan)
    cells = [
        _to_scale(plan, rank) if to_scale else [(str(action), 1) for action in plan[rank]]
        for rank in range(min(plan.ranks, _MOST_RANKS))
    ]
    unit = max((math.ceil((len(text) + 1) / n) for row in cells for text, n in row), default=1)
    label = len(f"rank {len(cells) - 1} │ ")
    lines = ["".join(_box(text, unit, n) for text, n in row).rstrip() for row in cells]
    room = max(1, (width - label) // unit) * unit
    longest = max(map(len, lines), default=0)
    blocks = range(0, longest, room)
    parts = [_title(plan)]
    for at in blocks[:_MOST_BLOCKS]:
        if at:
            parts.append("")
        parts += [
            f"{f'rank {rank}':<{label - 3}} │ {line[at : at + room]}".rstrip()
            for rank, line in enumerate(lines)
        ]
    if len(blocks) > _MOST_BLOCKS:
        hidden = (longest - _MOST_BLOCKS * room + unit - 1) // unit
        parts.append(
            f"… {counted(hidden, 'step')} more; write the plan to a .csv or .json file to see all"
        )
    if plan.ranks > len(cells):
        parts.append(f"… {counted(plan.ranks - len(cells), 'rank')} more")
    return "\n".join(parts)


def _box(text: str, unit: int, count: int) -> str:
    """An action that takes several units fills them with a line; a gap stays blank."""
    return f"{text:{'─' if text and count > 1 else ' '}<{unit * count - 1}} "


def _title(plan: Plan) -> str:
    per_rank, rest = divmod(plan.stages, plan.ranks)
    stages = counted(plan.stages if rest else per_rank, "stage")
    parts = [f"{counted(plan.ranks, 'rank')} × {stages}", counted(plan.microbatches, "micro-batch")]
    if plan.level != Level.COMPUTE:
        parts.append(f"{plan.level.name.lower()}, in order")
    return f"{plan.name}: {', '.join(parts)}"


def _to_scale(plan: Plan, rank: int) -> list[tuple[str, int]]:
    """(text, units of time) for what a rank does and for its gaps."""
    run = unit_run(plan)
    first, rows = int(plan.offsets[rank]), plan.rows_of(rank)
    starts = run.start[first : first + len(rows)][~rows.second_of_pair()].astype(np.int64).tolist()
    ends = run.arrival[first : first + len(rows)][~rows.second_of_pair()].astype(np.int64).tolist()
    cells: list[tuple[str, int]] = []
    now = 0
    for action, start, end in zip(rows.actions(), starts, ends, strict=True):
        if start > now:
            cells.append(("", start - now))
        text = str(action).replace(";", "&").replace("(", "").replace(")OVERLAP_F_B", "")
        cells.append((text, end - start))
        now = end
    return cells
