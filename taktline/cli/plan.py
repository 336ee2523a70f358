"""``taktline plan``: print or write a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from taktline.cli.options import Json, Size, complete_name, echo_json
from taktline.plan import find, lower, names, write
from taktline.plan.io import to_json
from taktline.text import counted


def plan(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of a schedule; without it, lists all.", autocompletion=complete_name
        ),
    ] = None,
    *,
    size: Size,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this .csv or .json file.")
    ] = None,
    lowered: Annotated[
        bool, typer.Option("--lower", help="Include every send and receive.")
    ] = False,
    json: Json = False,
) -> None:
    """Print or write a plan: the actions of each rank, in order.

    Examples:

    - `taktline plan` lists the schedules

    - `taktline plan 1f1b --ranks 4 --microbatches 8`

    - `taktline plan interleaved_1f1b -r 4 -s 2 -m 8 -o plan.csv`

    - `taktline plan zbv -r 4 -m 8 --lower --json`
    """
    if name is None:
        _list(json)
        return
    result = size.build(name)
    if lowered:
        result = lower(result)
    if output is not None:
        write(result, output)
        summary = f"{counted(len(result), 'action')} of {counted(result.ranks, 'rank')}"
        typer.echo(f"{output}: {summary}", err=json)
    if json:
        typer.echo(to_json(result), nl=False)
    elif output is None:
        typer.echo(str(result))


def _list(json: bool) -> None:
    summaries = {name: find(name).summary for name in names()}
    if json:
        echo_json(summaries)
        return
    width = max(map(len, summaries))
    for name, summary in summaries.items():
        typer.echo(f"{name:<{width}}  {summary}")
