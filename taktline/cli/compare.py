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
from taktline.render.svg import shared_axis
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
        _print(timelines, console(colour))


def _print(timelines: list[Timeline], screen: Console) -> None:
    """Print timelines as a table, a row each; the best figure of a column stands out."""
    plan, unit = timelines[0].plan, timelines[0].costs.unit
    found = [_as_dict(timeline) for timeline in timelines]

    def cell(figures: dict[str, Any], name: str, form: str) -> str:
        text = f"{figures[name]:{form}}"
        best = figures[name] <= min(each[name] for each in found) + 1e-9
        return f"[bold green]{text}[/]" if best and len(found) > 1 else text

    rows = [
        {
            "schedule": figures["schedule"],
            "stages/rank": str(figures["stages_per_rank"]),
            "bubble": cell(figures, "bubble", ".1%"),
            "by span": cell(figures, "bubble_by_span", ".1%"),
            f"makespan/{unit}" if unit else "makespan": cell(figures, "makespan", ".4g"),
            "memory": cell(figures, "peak_memory", ".4g"),
        }
        for figures in found
    ]
    if screen.width < NARROW:
        for row in rows:
            del row["stages/rank"], row["by span"]
    ranks, microbatches = counted(plan.ranks, "rank"), counted(plan.microbatches, "micro-batch")
    alike = len({(figures["ranks"], figures["microbatches"]) for figures in found}) == 1
    title = f"{ranks}, {microbatches}" if alike else None
    style = {"title": title, "caption": MEMORY, "caption_justify": "left"}
    screen.print(rich_table(rows, ["schedule"], **style))


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
