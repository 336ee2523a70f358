"""The command that finds a plan for given costs, beside the schedules that fit the same memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated, Any

import typer

from taktline import plan as plans
from taktline.cli.commands import figures, print_schedules
from taktline.cli.options import OUTPUT, Json, Within, echo_json
from taktline.plan import Costs
from taktline.plan.io import is_timeline
from taktline.plan.portfolio import Progress, fitting
from taktline.plan.work import Work
from taktline.text import counted


class Shape(StrEnum):
    """How stages are placed on ranks."""

    linear = auto()
    v = auto()
    looped = auto()


def optimise(
    *,
    times: Within,
    placement: Annotated[
        Shape, typer.Option(help="One stage per rank, or several in a V or in a loop.")
    ] = Shape.linear,
    costs: Annotated[
        Path | None, typer.Option(help="Costs and memory from this plan or timeline, .json.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time for the search.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of the search; the same again finds the same.")] = 0,
    makespan: Annotated[
        bool, typer.Option("--makespan", help="Make the makespan short, not a rank's own span.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(*OUTPUT, help="Write the plan to this .csv or .json file.")
    ] = None,
    json: Json = False,
) -> None:
    """Find the best plan for given costs and memory, and say what no plan can beat.

    Times and memory are for one micro-batch on a rank's whole share of the model; those in a file
    are per stage. Ctrl-C ends the search with the best plan so far.

    Examples:

    - `taktline optimise -r 8 -m 24 --memory 8 --forward 18.5 --backward 18.1 --weight 9.3`
    - `taktline optimise -r 8 -m 24 --placement v --memory 5 -o plan.json`
    - `taktline optimise --costs measured.json --placement v --memory 8`
    - `taktline optimise -r 4 -m 8 --memory 1.5 --offload 1.0 --recompute 1.0`
    """
    per_rank = times.stages_per_rank or 2
    used = times.costs(1 if placement is Shape.linear else per_rank, _known(costs))
    sizes: dict[str, Any] = {
        "ranks": times.ranks or 4,
        "microbatches": times.microbatches or 8,
        "memory": times.memory,
        "placement": placement.value,
        "stages_per_rank": per_rank,
    }
    with _progress() as progress:
        found = plans.optimise(
            used,
            **sizes,
            seconds=seconds,
            seed=seed,
            by="makespan" if makespan else "span",
            progress=progress,
        )
    if output is not None:
        plans.write(found, output, costs=used if output.suffix == ".json" else None)
        typer.echo(
            f"{output}: {counted(len(found), 'action')} of {counted(found.ranks, 'rank')}", err=json
        )
    limits = [math.inf if times.memory is None else times.memory] * found.ranks
    work = Work.of(used, found.placement, found.microbatches, limits)
    named = [plan for plan in fitting(work, used) if plan != found]
    timelines = [plans.simulate(plan, used) for plan in (*named, found)]
    best = plans.bound(used, **sizes)
    if json:
        bounds = {"makespan": best.makespan, "span": best.span, "proven": best.proven}
        echo_json({"bound": bounds, "plans": figures(timelines)})
        return
    print_schedules(timelines, used.unit)
    typer.echo(
        f"{found.name}: bubble {timelines[-1].bubble('span'):.2%} of the longest rank's own span; "
        f"no plan in this memory is below {best.bubble:.2%} ({best.proven})"
    )


def _known(path: Path | None) -> Costs | None:
    if path is None:
        return None
    return plans.read_timeline(path).costs if is_timeline(path) else plans.read_costs(path)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on the terminal, which shows how much is done, and the best bubble."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("searching …", total=1.0)

    def update(done: float, bubble: float) -> None:
        bar.start()  # not before the search has begun, or an error would stand below an empty bar
        bar.update(task, completed=done, description=f"bubble {bubble:.2%}")

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()
