"""Measured figures, kept in ``figures.json``, as the page docs/benchmarks.md and its plots.

A benchmark calls :func:`record`, which keeps its numbers where ``BENCH_RECORD`` is set, as ``make
bench`` does; ``python benchmarks/_figures.py`` then writes page and plots.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
from collections.abc import Mapping
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STORE = ROOT / "benchmarks" / "figures.json"
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
COLOURS = {"torch": "#9aa0a6", "taktline": "#3b75af"}
OTHERS = ("#3f8746", "#e08a2c", "#8a6d3b")
TITLES = {
    "ScheduleGPipe": "GPipe",
    "Schedule1F1B": "1F1B",
    "ScheduleInterleaved1F1B": "interleaved 1F1B",
    "ScheduleLoopedBFS": "looped BFS",
    "ScheduleInterleavedZeroBubble": "interleaved zero bubble",
    "ScheduleZBVZeroBubble": "ZB-V",
    "ScheduleDualPipeV": "DualPipeV",
}
WIDTH, LEFT, BAR, GAP = 720, 190, 15, 10
HEAD = """# Benchmarks

What the README states, as plots, with the command, the machine, the versions and the date of each.
`make bench` runs all benchmarks that need no GPU, each with torch's pipelining in the same run, and
draws this page anew; figures of a GPU stay as they are. Numbers of single runs vary; where it
matters, the README says by how much.
"""


def record(figure: str, label: str, values: Mapping[str, float]) -> None:
    """Keep a row of a figure, if results are to be kept, as measured here and today."""
    if not os.environ.get("BENCH_RECORD"):
        return
    figures = json.loads(STORE.read_text())
    figures[figure]["rows"][label] = {name: round(value, 3) for name, value in values.items()}
    cores = len(os.sched_getaffinity(0))
    figures[figure]["machine"] = f"{cores} cores ({platform.machine()})"
    figures[figure]["versions"] = f"Python {platform.python_version()}, torch {version('torch')}"
    figures[figure]["date"] = datetime.date.today().isoformat()
    STORE.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


def to_svg(figure: Mapping[str, Any]) -> str:
    """Bars, one for each number; on a logarithmic axis where they differ by orders."""
    rows: dict[str, dict[str, float]] = figure["rows"]
    numbers = [number for row in rows.values() for number in row.values()]
    least, most = min(numbers), max(numbers)
    is_log = most > 50 * max(least, 1e-9)
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    colours = dict(zip([n for n in names if n not in COLOURS], OTHERS, strict=False)) | COLOURS
    room = WIDTH - LEFT - 70

    def length(number: float) -> float:
        if is_log:
            low = math.floor(math.log10(least))
            return room * (math.log10(number) - low) / (math.log10(most) - low)
        return room * number / most

    parts, y = list[str](), 34.0
    for at, name in enumerate(names):
        x = LEFT + 130 * at
        parts.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{colours[name]}"/>')
        parts.append(f'<text x="{x + 18}" y="18">{escape(name)}</text>')
    for label, row in rows.items():
        middle = y + BAR * len(row) / 2 + 4
        parts.append(
            f'<text x="{LEFT - 10}" y="{middle:g}" text-anchor="end">{escape(label)}</text>'
        )
        for name, number in row.items():
            size = max(1.0, length(number))
            bar = f'<rect x="{LEFT}" y="{y:g}" width="{size:.1f}" height="{BAR - 2}"'
            parts.append(f'{bar} fill="{colours[name]}"/>')
            parts.append(f'<text x="{LEFT + size + 6:.1f}" y="{y + 11:g}">{number:,g}</text>')
            y += BAR
        y += GAP
    style = "<style>text{font:12px sans-serif;fill:#333}</style>"
    ground = f'<rect width="{WIDTH}" height="{y:g}" fill="white"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" role="img">'
    return "\n".join([head, style, ground, *parts, "</svg>"]) + "\n"


def to_page(figures: Mapping[str, Any]) -> str:
    """The page, with a section for each figure."""
    parts = [HEAD]
    for name, figure in figures.items():
        numbers = [number for row in figure["rows"].values() for number in row.values()]
        axis = "; logarithmic axis" * (max(numbers) > 50 * max(min(numbers), 1e-9))
        where = f"{figure['machine']}, {figure['versions']}, {figure['date']}"
        parts.append(
            f"## {figure['title']}\n\n{figure['what']}{axis}. `{figure['command']}`\n\n"
            f"![{figure['title']}](images/bench-{name}.svg)\n\n*{where}*\n"
        )
    return "\n".join(parts)


def files() -> dict[Path, str]:
    """What is written where."""
    figures = json.loads(STORE.read_text())
    drawn = {IMAGES / f"bench-{name}.svg": to_svg(figure) for name, figure in figures.items()}
    return {PAGE: to_page(figures), **drawn}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
