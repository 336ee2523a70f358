"""``taktline compare``: schedules side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from taktline.cli.options import (
    Backward,
    Comm,
    Forward,
    Json,
    Predict,
    Weight,
    echo_json,
    is_file,
    load,
    make_costs,
    read_timelines,
)
from taktline.plan import Timeline, build, find, names, simulate
from taktline.plan.render.scale import shared_axis
from taktline.plan.timeline_io import is_timeline
from taktline.plan.words import counted

__all__ = ["compare", "for_one_model", "print_table"]


def compare(
    schedules: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|NAME…", help="Schedules, plans or timelines; by default all schedules."
        ),
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-r", help="How many ranks (devices).")] = 4,
    stages_per_rank: Annotated[
        int | None,
        typer.Option("--stages-per-rank", "-s", help="For schedules that leave it open."),
    ] = None,
    microbatches: Annotated[
        int, typer.Option("--microbatches", "-m", help="How many micro-batches.")
    ] = 8,
    forward: Forward = None,
    backward: Backward = None,
    weight: Weight = None,
    comm: Comm = None,
    predict: Predict = False,
    json: Json = False,
) -> None:
    """Compare schedules for one model on the same ranks: bubble, makespan, peak memory.

    Times and memory are those of a rank's whole share of the model for one micro-batch; where a
    rank holds several stages, each takes its part of it. A file keeps its own numbers: a plan is
    simulated with its costs, and a timeline is what was measured, or written down.

    Examples:

    - `taktline compare`

    - `taktline compare 1f1b zb_h1 zbv --ranks 8 --microbatches 32 --comm 0.05`

    - `taktline compare measured.json --predict`
    """
    timelines: list[Timeline] = []
    for target in schedules or [name for name in names() if name != "forward_only"]:
        if not is_file(target):
            times = (forward, backward, weight, comm)
            timelines += for_one_model([target], ranks, microbatches, stages_per_rank, *times)
        elif is_timeline(target):
            timelines += read_timelines(target, predict)
        else:
            plan, known = load(target, None, None, None)
            timelines.append(simulate(plan, make_costs(known, forward, backward, weight, comm)))
    shared_axis(timelines)  # raises if they cannot be compared
    if json:
        echo_json([_as_dict(timeline) for timeline in timelines])
    else:
        print_table(timelines)


def for_one_model(
    schedules: list[str],
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    forward: float | None = None,
    backward: float | None = None,
    weight: float | None = None,
    comm: float | None = None,
) -> list[Timeline]:
    """The schedules simulated with the times of a rank's whole share of the model."""
    timelines: list[Timeline] = []
    for name in schedules:
        asked = stages_per_rank if find(name).stages_per_rank is None else None
        plan = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=asked)
        costs = make_costs(None, forward, backward, weight, comm, share=plan.stages // ranks)
        timelines.append(simulate(plan, costs))
    return timelines


def print_table(timelines: list[Timeline]) -> None:
    """Print timelines as a table, a row each; the best figure of a column stands out."""
    from rich.console import Console
    from rich.table import Table

    plan = timelines[0].plan
    shapes = {(t.plan.ranks, t.plan.microbatches) for t in timelines}
    ranks, microbatches = counted(plan.ranks, "rank"), counted(plan.microbatches, "micro-batch")
    table = Table(title=f"{ranks}, {microbatches}" if len(shapes) == 1 else None)
    table.add_column("schedule", no_wrap=True)
    unit = timelines[0].costs.unit
    makespan = f"makespan/{unit}" if unit else "makespan"
    for heading in ("stages/rank", "bubble", "by span", makespan, "memory"):
        table.add_column(heading, justify="right")
    figures = [
        (t.bubble(), t.bubble("span"), t.makespan, float(t.peak_memory.max())) for t in timelines
    ]
    best = [min(column) for column in zip(*figures, strict=True)]
    for timeline, row in zip(timelines, figures, strict=True):
        texts = [f"{row[0]:.1%}", f"{row[1]:.1%}", f"{row[2]:.4g}", f"{row[3]:.4g}"]
        table.add_row(
            timeline.name,
            str(timeline.plan.stages // timeline.plan.ranks),
            *(
                f"[bold green]{text}[/]" if value <= low + 1e-9 and len(timelines) > 1 else text
                for text, value, low in zip(texts, row, best, strict=True)
            ),
        )
    Console().print(table)


def _as_dict(timeline: Timeline) -> dict[str, object]:
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
