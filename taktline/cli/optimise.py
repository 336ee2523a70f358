"""The command that finds a plan for given costs, beside the schedules that fit the same memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated

import typer

from taktline import plan as plans
from taktline.cli.commands import figures, print_schedules
from taktline.cli.options import OUTPUT, Colour, Json, Times, console, echo_json
from taktline.errors import TaktlineError
from taktline.plan import Costs, Placement, Timeline
from taktline.plan.io import is_timeline
from taktline.plan.portfolio import Progress, fitting
from taktline.plan.timeline import By
from taktline.plan.work import Work
from taktline.text import counted


class Shape(StrEnum):
    """How stages are placed on ranks."""

    linear = auto()
    v = auto()
    looped = auto()
    any = auto()


def optimise(
    *,
    times: Times,
    placement: Annotated[
        Shape, typer.Option(help="One stage per rank, several in a V or a loop; or the best.")
    ] = Shape.linear,
    memory: Annotated[
        float | None,
        typer.Option(help="Memory of a rank, in activations of a micro-batch (default: any)."),
    ] = None,
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
    colour: Colour = None,
) -> None:
    """Find the best plan for given costs and memory, and say what no plan can beat.

    Times and memory are for one micro-batch on a rank's whole share of the model; those in a file
    are per stage. Ctrl-C ends the search with the best plan so far.

    Examples:

    - `taktline optimise -r 8 -m 24 --memory 8 --forward 18.5 --backward 18.1 --weight 9.3`
    - `taktline optimise -r 8 -m 24 --placement v --memory 5 -o plan.json`
    - `taktline optimise --costs measured.json --placement any --memory 8`
    """
    ranks, per_rank = times.ranks or 4, times.stages_per_rank or 2
    shapes = {
        Shape.linear: Placement.linear(ranks),
        Shape.v: Placement.v(ranks, per_rank),
        Shape.looped: Placement.loop(ranks, per_rank),
    }
    tried = list(shapes.values()) if placement is Shape.any else [shapes[placement]]
    known = _known(costs)
    microbatches = times.microbatches or 8
    by: By = "makespan" if makespan else "span"
    best: tuple[float, Placement, Costs, plans.Plan] | None = None
    refused: TaktlineError | None = None
    for shape in tried:
        # Times are shared by the stages of a rank, as they are in any plan with this placement.
        each = shape.stages // ranks
        try:
            used = times.costs(
                plans.build("forward_only", ranks=ranks, microbatches=1, stages_per_rank=each),
                known,
            )
            with _progress() as progress:
                found = plans.optimise(
                    used,
                    placement=shape,
                    microbatches=microbatches,
                    memory=memory,
                    seconds=seconds / len(tried),
                    seed=seed,
                    by=by,
                    progress=progress,
                )
        except TaktlineError as error:  # the costs are for another number of stages
            refused = refused or error
            continue
        cost = plans.simulate(found, used).cost(by)
        if best is None or cost < best[0]:
            best = cost, shape, used, found
    if best is None:
        assert refused is not None
        raise refused
    _, shape, used, found = best
    if output is not None:
        plans.write(found, output, costs=used if output.suffix == ".json" else None)
        typer.echo(
            f"{output}: {counted(len(found), 'action')} of {counted(ranks, 'rank')}", err=json
        )
    limit = math.inf if memory is None else memory
    work = Work.of(used, shape, microbatches, [limit] * ranks)
    named = [plan for plan in fitting(work, used) if plan != found]
    timelines = [plans.simulate(plan, used) for plan in (*named, found)]
    least = plans.bound(used, placement=shape, microbatches=microbatches, memory=memory)
    if json:
        bounds = {"makespan": least.makespan, "span": least.span, "proven": least.proven}
        echo_json({"bound": bounds, "plans": figures(timelines)})
        return
    print_schedules(figures(timelines), used.unit, console(colour))
    typer.echo(_verdict(timelines[-1], least))


def _verdict(timeline: Timeline, best: plans.Bound) -> str:
    return (
        f"{timeline.name}: bubble {timeline.bubble('span'):.2%} of the longest rank's own span; no "
        f"plan in this memory is below {best.bubble:.2%} ({best.proven})"
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
