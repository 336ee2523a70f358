"""``taktline explore``: a page in which schedules are planned, simulated and compared.

``page.html`` is the page, ``planner.js`` has the schedules and the simulation, and the other
scripts draw them. The result is one file that loads nothing else.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import typer

from taktline.cli.options import OUTPUT, Times, complete_name, optimised
from taktline.errors import ArgumentError
from taktline.plan import Kind, find, names
from taktline.plan.io import write_text
from taktline.render.svg import COLOURS, MEANINGS

_SCRIPTS = ("planner.js", "chart.js", "cards.js", "plot.js", "page.js")

_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)

_SETTINGS: dict[str, tuple[str, float, float, float, float]] = {
    "ranks": ("ranks", 1, 32, 1, 4),
    "stages_per_rank": ("stages per rank, if open", 1, 8, 1, 2),
    "microbatches": ("micro-batches", 1, 128, 1, 8),
    "forward": ("F: forward", 0.1, 4, 0.1, 1),
    "backward": ("I: backward, inputs", 0.1, 4, 0.1, 1),
    "weight": ("W: backward, weights", 0.1, 4, 0.1, 1),
    "comm": ("link: a message", 0, 2, 0.05, 0),
    "memory": ("memory: micro-batches, 0: any", 0, 32, 0.5, 0),
}
"""The sliders: label, minimum, maximum, step and default."""


def explore(
    schedules: list[str] | None = typer.Argument(
        None,
        metavar="NAME…",
        help="Schedules to begin with (default 1f1b and zbv).",
        autocompletion=complete_name,
    ),
    *,
    times: Times,
    memory: float | None = typer.Option(None, help="Memory limit of a rank, in micro-batches."),
    output: Path = typer.Option(Path("explorer.html"), *OUTPUT, help="File for the page."),
) -> None:
    """Write an interactive page that compares schedules: sliders, charts, bubble against memory.

    The page plans and simulates by itself; the options set its first values.

    Examples:

    - `taktline explore`
    - `taktline explore 1f1b zbv v_half -r 8 -m 32 --comm 0.1 -o explorer.html`
    """
    if output.suffix.lower() != ".html":
        raise ArgumentError(f"the page is an .html file, not {output.suffix or output.name!r}")
    write_text(output, page(schedules, **asdict(times), memory=memory))
    typer.echo(f"{output}: open it in a browser")


def page(schedules: list[str] | None = None, **settings: Any) -> str:
    """The page, with these schedules and settings at first, and the best plan found for these.

    >>> page(["zbv"], ranks=8)[:15]
    '<!doctype html>'
    """
    chosen = [find(name).name for name in schedules or ("1f1b", "zbv")]
    if "forward_only" in chosen:
        raise ArgumentError("forward_only has no backward, and no bubble to compare")
    known = [name for name in names() if name != "forward_only"]
    shown = [_setting(name, settings.get(name)) for name in _SETTINGS]
    content: dict[str, Any] = {
        "schedules": {name: find(name).summary for name in known},
        "open": [name for name in names() if find(name).stages_per_rank is None],
        "colours": {kind.name: COLOURS[kind] for kind in _KINDS},
        "meanings": {kind.name: MEANINGS[kind] for kind in _KINDS},
        "chosen": list(dict.fromkeys(chosen)),
        "settings": shown,
        "found": _found(tuple(known), *(setting["value"] for setting in shown)),
    }
    put = {
        "data": json.dumps(content, separators=(",", ":")).replace("<", "\\u003c"),
        "script": "\n".join(map(_text, _SCRIPTS)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: put[match[1]], _text("page.html"))


@cache
def _found(known: tuple[str, ...], ranks: int, each: int, many: int, *costs: float) -> Any:
    """What the best plan has that is found; None if no schedule fits into the memory."""
    *times, memory = costs
    timelines = Times(ranks, each, many, *times).timelines(known, predict=False)
    for best in optimised(timelines, memory or math.inf):
        peak = float(best.peak_memory.max())
        return {"bubble": best.bubble(), "makespan": best.makespan, "peak": peak}


def _text(name: str) -> str:
    return files("taktline.cli.explorer").joinpath(name).read_text("utf-8")


def _setting(name: str, asked: float | None) -> dict[str, Any]:
    label, least, most, step, default = _SETTINGS[name]
    if asked is not None and not least <= asked <= most:
        option = "--" + name.replace("_", "-")
        raise ArgumentError(f"{option} must be from {least:g} to {most:g}, not {asked:g}")
    value = default if asked is None else asked
    return {"name": name, "label": label, "min": least, "max": most, "step": step, "value": value}
