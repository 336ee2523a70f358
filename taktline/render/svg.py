"""Timelines as SVG: to scale, with micro-batch numbers, bubbles and memory; fit for a paper.

The colours and the time axis are those of all drawings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from taktline.checks import check
from taktline.errors import CostError, PlanError
from taktline.plan.action import COPIES, Kind
from taktline.plan.memory import memory_curve
from taktline.plan.plan import Placement
from taktline.plan.timeline import Timeline
from taktline.text import counted, memory_text

COLOURS = {
    Kind.F: "#3b75af",
    Kind.RECOMPUTE: "#6d5fb0",
    Kind.B: "#3f8746",
    Kind.I: "#23827c",
    Kind.W: "#e08a2c",
    Kind.OFFLOAD: "#8a6d3b",
    Kind.RELOAD: "#b04a7a",
}
"""In the order of the kinds, up to the last that is drawn. No two differ in red and green alone."""

MEANINGS = {
    Kind.F: "forward",
    Kind.RECOMPUTE: "forward again",
    Kind.B: "backward",
    Kind.I: "backward for the inputs",
    Kind.W: "backward for the weights",
    Kind.OFFLOAD: "copy to the host",
    Kind.RELOAD: "copy back",
}

MEMORY = "#7d70ab"
"""The colour of memory curves."""

LANE, GAP = 24.0, 4.0  # a rank's row, and the space between two
COPY = 6.0  # the row of its copies in one direction, below
STRIP = 16.0  # a rank's memory curve
LEFT, RIGHT, TOP = 64.0, 64.0, 30.0
HATCHING = (
    "<defs><pattern id='idle' width='5' height='5' patternUnits='userSpaceOnUse' "
    "patternTransform='rotate(45)'><rect width='5' height='5' fill='#f4f4f2'/>"
    "<line x1='0' y1='0' x2='0' y2='5' stroke='#dddcd8' stroke-width='1.5'/></pattern></defs>"
)
FONT = "font-family='Helvetica, Arial, sans-serif' font-size='10'"


def shade(kind: Kind, chunk: int, chunks: int) -> str:
    """The colour of a kind for a rank's ``chunk``-th stage of ``chunks``: later ones are lighter.

    >>> shade(Kind.F, 0, 2), shade(Kind.F, 1, 2)
    ('#3b75af', '#93b3d3')
    """
    colour, share = COLOURS[kind], 0.45 * chunk / max(1, chunks - 1)
    channels = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in channels)


def shades(placement: Placement) -> dict[Kind, list[str]]:
    """The colour of each kind for every stage.

    >>> shades(Placement.v(2))[Kind.F]
    ['#3b75af', '#3b75af', '#93b3d3', '#93b3d3']
    """
    of_rank = [placement.stages_of(rank) for rank in range(placement.ranks)]
    chunks = [
        (of_rank[r].index(stage), len(of_rank[r])) for stage, r in enumerate(placement.rank_of)
    ]
    return {kind: [shade(kind, *chunk) for chunk in chunks] for kind in COLOURS}


def is_dark(colour: str) -> bool:
    """Whether white letters stand out on a colour: a contrast of 4 to 1, as WCAG counts it.

    >>> is_dark(COLOURS[Kind.F]), is_dark(COLOURS[Kind.W])
    (True, False)
    """
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 1.05 / (luminance + 0.05) >= 4


def shared_axis(timelines: Sequence[Timeline]) -> tuple[float, str]:
    """Where the one axis of all timelines ends, and its unit."""
    if not timelines:
        raise PlanError("a drawing without timelines: pass at least one")
    units = sorted({timeline.costs.unit for timeline in timelines})
    if len(units) > 1:
        raise CostError(
            f"times in {' and '.join(map(repr, units))} do not share an axis: use one unit for all "
            "costs"
        )
    return max(timeline.makespan for timeline in timelines) or 1.0, units[0]


def nice_ticks(end: float, most: float) -> list[float]:
    """Round numbers from 0 to ``end``, about ``most`` of them.

    >>> nice_ticks(33, 8)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if end <= 0:
        return [0.0]
    rough = end / max(most, 1.0)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [number * step for number in range(math.floor(end / step * (1 + 1e-9)) + 1)]


def to_svg(timelines: Sequence[Timeline], *, width: float | None = None) -> str:
    """One drawing of one or several timelines, below each other on one time axis.

    ``width`` is in pixels; by default there is room for a number in the shortest action.

    >>> from taktline.plan import build, simulate
    >>> drawing = to_svg([simulate(build("1f1b", ranks=4, microbatches=8))])
    >>> drawing[:4]
    '<svg'
    """
    if width is not None:
        width = check("width", width, float, least=0, most=100_000)
    makespan, unit = shared_axis(timelines)
    total = natural_width(timelines) if width is None else width
    scale = max(total - LEFT - RIGHT, 1.0) / makespan
    parts: list[str] = []
    y = 8.0
    for timeline in timelines:
        parts += _timeline(timeline, y, scale, f" {unit}" if unit else "")
        y += _height(timeline)
    legend, y = _legend(timelines, y, total)
    name = ", ".join(timeline.name for timeline in timelines)
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {total:.6g} {y:.6g}' "
            f"width='{total:.6g}' height='{y:.6g}' {FONT}>",
            f"<title>{escape(name)}</title>",
            HATCHING,
            f"<rect width='{total:.6g}' height='{y:.6g}' fill='white'/>",
            *parts,
            *legend,
            "</svg>",
            "",
        ]
    )


def natural_width(timelines: Sequence[Timeline]) -> float:
    """Pixels with room for a number in the shortest action, as far as that is sensible."""
    makespan, _ = shared_axis(timelines)
    shortest = min(makespan, *(_shortest(timeline) for timeline in timelines))
    digits = max(len(str(timeline.plan.microbatches - 1)) for timeline in timelines)
    room = (6.0 * digits + 5.0) * makespan / shortest
    return LEFT + RIGHT + min(max(room, 640.0), 16_000.0)


def _shortest(timeline: Timeline) -> float:
    """How long the shortest action lasts; of measured ones, some last hardly any time."""
    lasting = (timeline.end - timeline.start)[timeline.plan.rows.kind <= Kind.W]
    lasting = lasting[lasting > 0]
    if timeline.measured and len(lasting):
        lasting = lasting[lasting >= 0.2 * np.median(lasting)]
    return float(lasting.min(initial=np.inf))


def _height(timeline: Timeline) -> float:
    ranks = timeline.plan.ranks
    return TOP + ranks * _pitch(timeline) + 36 + ranks * (STRIP + GAP) + 22


def _pitch(timeline: Timeline) -> float:
    return LANE + GAP + 2 * COPY * timeline.plan.has(*COPIES)


def _timeline(timeline: Timeline, y: float, scale: float, unit: str) -> Iterator[str]:
    plan = timeline.plan
    facts = (
        f"{counted(plan.ranks, 'rank')}, {counted(plan.microbatches, 'micro-batch')}, "
        f"makespan {timeline.makespan:.5g}{unit}, bubble {timeline.bubble():.1%}"
    )
    yield (
        f"<text x='{LEFT:g}' y='{y + 12:g}' font-size='13' font-weight='bold' fill='#222'>"
        f"{escape(timeline.name)}<tspan font-weight='normal' font-size='11' fill='#555' dx='8'>"
        f"{escape(facts)}</tspan></text>"
    )
    y += TOP
    fills = shades(plan.placement)
    for rank in range(plan.ranks):
        top = y + rank * _pitch(timeline)
        yield _label(f"rank {rank}", top + LANE / 2)
        yield (
            f"<rect x='{LEFT:g}' y='{top:g}' width='{timeline.makespan * scale:.2f}' "
            f"height='{LANE:g}' fill='url(#idle)'/>"
        )
        yield from _boxes(timeline, rank, top, scale, fills)
    y += plan.ranks * _pitch(timeline)
    yield from _axis(timeline, y, scale, unit)
    yield from _memory(timeline, y + 28, scale)


def _boxes(
    timeline: Timeline, rank: int, top: float, scale: float, fills: dict[Kind, list[str]]
) -> Iterator[str]:
    plan = timeline.plan
    rows, first = plan.rows_of(rank), int(plan.offsets[rank])
    second = rows.second_of_pair()
    for at in np.flatnonzero(rows.kind <= Kind.RELOAD).tolist():
        leaf = rows.leaf(at)
        start, end = float(timeline.start[first + at]), float(timeline.end[first + at])
        # The halves of an overlapped pair lie above each other.
        paired = bool(rows.joined[at] or second[at])
        height = LANE / 2 if paired else LANE
        y = top + (LANE / 2 if second[at] else 0.0)
        if leaf.kind in COPIES:
            height, y = COPY, top + LANE + COPY * (leaf.kind == Kind.RELOAD)
        fill = fills[leaf.kind][leaf.stage]
        x, width = LEFT + start * scale, (end - start) * scale
        label = str(leaf.microbatch)
        yield (
            f"<rect x='{x:.2f}' y='{y:g}' width='{width:.2f}' height='{height:g}' fill='{fill}' "
            f"stroke='white' stroke-width='{min(1.0, width / 8):.2g}'>"
            f"<title>{leaf}: {start:g} – {end:g}</title></rect>"
        )
        if width >= 5.6 * len(label) + 1 and height > COPY:
            ink = "white" if is_dark(fill) else "#222"
            yield (
                f"<text x='{x + width / 2:.2f}' y='{y + height / 2 + 3.4:g}' "
                f"text-anchor='middle' fill='{ink}'>{label}</text>"
            )


def _axis(timeline: Timeline, y: float, scale: float, unit: str) -> Iterator[str]:
    end = LEFT + timeline.makespan * scale
    yield f"<path d='M{LEFT:g} {y:g}H{end:.2f}' stroke='#888' fill='none'/>"
    for tick in nice_ticks(timeline.makespan, timeline.makespan * scale / 70):
        x = LEFT + tick * scale
        yield f"<path d='M{x:.2f} {y:g}v4' stroke='#888'/>"
        yield (
            f"<text x='{x:.2f}' y='{y + 14:g}' text-anchor='middle' fill='#555'>"
            f"{tick:g}{escape(unit) if tick == 0 else ''}</text>"
        )


def _memory(timeline: Timeline, y: float, scale: float) -> Iterator[str]:
    """One filled step curve a rank, all to one height, the peak written at its end."""
    plan = timeline.plan
    during, after = memory_curve(plan, timeline.costs)
    height = STRIP / max(float(during.max(initial=0.0)), 1e-12)
    computes = np.flatnonzero((plan.rows.kind <= Kind.W) & ~plan.rows.joined)
    end = LEFT + timeline.makespan * scale
    unit = timeline.costs.memory_unit
    yield (
        f"<text x='{LEFT:g}' y='{y + 1.4:g}' fill='#333'><tspan font-weight='bold'>memory</tspan>"
        f", in {unit}</text>"
    )
    y += 8
    for rank in range(plan.ranks):
        base = y + (rank + 1) * (STRIP + GAP) - GAP
        mine = computes[(computes >= plan.offsets[rank]) & (computes < plan.offsets[rank + 1])]
        path = [f"M{LEFT:g} {base:g}"]
        for row, following in zip(mine.tolist(), [*mine[1:].tolist(), None], strict=True):
            steps = [(timeline.start[row], during[row])]
            # Memory that is released just as the next action begins would only draw a needle.
            if following is None or (timeline.start[following] - timeline.end[row]) * scale > 2:
                steps.append((timeline.end[row], after[row]))
            for time, level in steps:
                path.append(f"H{LEFT + time * scale:.2f}V{base - level * height:.2f}")
        yield _label(f"rank {rank}", base - STRIP / 2)
        yield (
            f"<path d='M{LEFT:g} {base:g}H{end:.2f}' stroke='#ccc' fill='none'/>"
            f"<path d='{''.join(path)}H{end:.2f}V{base:g}Z' fill='{MEMORY}' fill-opacity='0.4' "
            f"stroke='{MEMORY}' stroke-width='0.8'/>"
        )
        peak = memory_text(float(timeline.peak_memory[rank]), unit)
        peak = peak if unit == "bytes" else f"peak {peak}"
        yield f"<text x='{end + 6:.2f}' y='{base - 2:g}' fill='#555'>{peak}</text>"


def _legend(timelines: Sequence[Timeline], y: float, width: float) -> tuple[list[str], float]:
    """The marks and their meanings, in as many lines as it takes; and where they end."""
    used = {Kind(kind) for t in timelines for kind in np.unique(t.plan.rows.kind).tolist()}
    chunks = max(
        len(t.plan.placement.stages_of(rank)) for t in timelines for rank in range(t.plan.ranks)
    )
    entries = [
        (COLOURS[kind], f"{MEANINGS[kind]} ({kind.name})") for kind in sorted(used & COLOURS.keys())
    ]
    entries.append(("url(#idle)", "idle"))
    if chunks > 1:
        entries.append((shade(Kind.F, 1, 2), "lighter: a rank's later stages"))
    parts: list[str] = []
    x = LEFT
    for fill, text in entries:
        room = 35 + 5.2 * len(text)
        if x > LEFT and x + room > width + 10:
            x, y = LEFT, y + 18
        parts.append(f"<rect x='{x:g}' y='{y:g}' width='12' height='12' fill='{fill}'/>")
        parts.append(f"<text x='{x + 17:g}' y='{y + 10:g}' fill='#333'>{text}</text>")
        x += room
    return parts, y + 22


def _label(text: str, y: float) -> str:
    return f"<text x='{LEFT - 8:g}' y='{y + 3.4:g}' text-anchor='end' fill='#333'>{text}</text>"
