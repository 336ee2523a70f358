"""``taktline compare``: schedules side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from taktline.cli.options import (
    MEMORY,
    NARROW,
    Colour,
    Json,
    Predict,
    Times,
    complete,
    console,
    echo_json,
    rich_table,
)
from taktline.plan import Timeline, names
from taktline.render.scale import shared_axis
from taktline.text import counted

if TYPE_CHECKING:
    from rich.console import Console


def compare(
    schedules: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|NAME…",
            help="Schedules, plans or timelines; by default all schedules that train.",
            autocompletion=complete,
        ),
    ] = None,
    *,
    times: Times,
    predict: Predict = False,
    json: Json = False,
    colour: Colour = None,
) -> None:
    """Compare schedules for one model on the same ranks: bubble, makespan, peak memory.

    Times and memory are for one micro-batch on a rank's whole share of the model; the stages of a
    rank share them equally. Files keep their own numbers: a plan is simulated with its costs, and
    a timeline is shown as it is.

    Examples:

    - `taktline compare`

    - `taktline compare 1f1b zb_h1 zbv --ranks 8 --microbatches 32 --comm 0.05`

    - `taktline compare measured.json --predict`
    """
    trained = [name for name in names() if name != "forward_only"]
    timelines = times.timelines(schedules or trained, predict=predict)
    shared_axis(timelines)  # raises if they cannot be compared
    if json:
        echo_json([_as_dict(timeline) for timeline in timelines])
    else:
        _print_table(timelines, console(colour))


def _print_table(timelines: list[Timeline], screen: Console) -> None:
    """Print timelines as a table, a row each; the best figure of a column stands out."""
    plan, unit = timelines[0].plan, timelines[0].costs.unit
    shapes = {(t.plan.ranks, t.plan.microbatches) for t in timelines}
    ranks, microbatches = counted(plan.ranks, "rank"), counted(plan.microbatches, "micro-batch")
    title = f"{ranks}, {microbatches}" if len(shapes) == 1 else None
    makespan = f"makespan/{unit}" if unit else "makespan"
    headings = ["schedule", "stages/rank", "bubble", "by span", makespan, "memory"]
    figures = [[found[name] for name in _FIGURES] for found in map(_as_dict, timelines)]
    best = [min(column) for column in zip(*figures, strict=True)]
    rows: list[list[str]] = []
    for timeline, row in zip(timelines, figures, strict=True):
        texts = [f"{row[0]}", f"{row[1]:.1%}", f"{row[2]:.1%}", f"{row[3]:.4g}", f"{row[4]:.4g}"]
        for place in range(1, 5):
            if row[place] <= best[place] + 1e-9 and len(timelines) > 1:
                texts[place] = f"[bold green]{texts[place]}[/]"
        rows.append([timeline.name, *texts])
    if screen.width < NARROW:
        headings, *rows = ([row[at] for at in (0, 2, 4, 5)] for row in (headings, *rows))
    style = {"title": title, "caption": MEMORY, "caption_justify": "left"}
    screen.print(rich_table(headings, rows, ["schedule"], **style))


_FIGURES = ("stages_per_rank", "bubble", "bubble_by_span", "makespan", "peak_memory")
"""The numbers of a row."""


def _as_dict(timeline: Timeline) -> dict[str, Any]:
    plan = timeline.plan
    return {
        "schedule": timeline.name,
        "ranks": plan.ranks,
        "stages_per_rank": plan.stages // plan.ranks,
        "microbatches": plan.microbatches,
        "bubble": timeline.bubble(),
        "bubble_by_span": timeline.bubble("span"),
        "makespan": timeline.makespan,
        "peak_memory": float(timeline.peak_memory.max()),
    }
