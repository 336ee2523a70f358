"""``taktline simulate``: the time, the idle time and the memory of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from taktline.cli.options import (
    MEMORY,
    NARROW,
    Colour,
    Json,
    Times,
    complete,
    console,
    echo_json,
    rich_table,
)
from taktline.plan import Timeline
from taktline.text import counted

if TYPE_CHECKING:
    from rich.console import Console


def simulate(
    target: Annotated[
        str,
        typer.Argument(metavar="FILE|NAME", help="A plan or a schedule.", autocompletion=complete),
    ],
    *,
    times: Times,
    json: Json = False,
    colour: Colour = None,
) -> None:
    """Simulate a plan: busy and idle time, bubble and peak memory of each rank.

    Times are for one micro-batch on a rank's whole share of the model. Files with costs keep their
    own, which are per stage.

    Examples:

    - `taktline simulate plan.csv --forward 1 --backward 1.1 --weight 0.9 --comm 0.05`

    - `taktline simulate zb_h1 -r 8 -m 24`
    """
    timeline = times.simulate(target)
    if json:
        echo_json(
            {
                "name": timeline.plan.name,
                "makespan": timeline.makespan,
                "bubble": timeline.bubble(),
                "bubble_by_span": timeline.bubble("span"),
                "rank_spans": timeline.rank_spans.tolist(),
                "busy": timeline.busy.tolist(),
                "utilisation": timeline.utilisation.tolist(),
                "peak_memory": timeline.peak_memory.tolist(),
                "critical_path": [str(span.action) for span in timeline.critical_path()],
            }
        )
    else:
        _show(timeline, console(colour))


def _show(timeline: Timeline, screen: Console) -> None:
    plan = timeline.plan
    microbatches = counted(plan.microbatches, "micro-batch")
    rows = [
        {
            "rank": str(rank),
            "stages": " ".join(map(str, plan.placement.stages_of(rank))),
            "busy": f"{timeline.busy[rank]:.4g}",
            "idle": f"{timeline.makespan - timeline.busy[rank]:.4g}",
            "span": f"{timeline.rank_spans[rank]:.4g}",
            "utilisation": f"{timeline.utilisation[rank]:.1%}",
            "memory": f"{timeline.peak_memory[rank]:.4g}",
        }
        for rank in range(plan.ranks)
    ]
    if screen.width < NARROW:
        for row in rows:
            del row["span"], row["utilisation"]
    screen.print(rich_table(rows, title=f"{plan.name}: {plan.placement}, {microbatches}"))
    unit = f" {timeline.costs.unit}" if timeline.costs.unit else ""
    typer.echo(
        f"makespan {timeline.makespan:.6g}{unit}; bubble {timeline.bubble():.2%} of it, "
        f"{timeline.bubble('span'):.2%} of the longest rank's own span\n{MEMORY}"
    )
