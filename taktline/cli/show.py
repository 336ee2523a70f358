"""``taktline show``: draw plans and timelines."""

from __future__ import annotations

from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated

import typer

from taktline.cli.options import MEMORY, Colour, Predict, Times, complete, console
from taktline.errors import ArgumentError
from taktline.plan import Timeline
from taktline.plan.io import write_text
from taktline.render.files import save
from taktline.render.text import chart, grid, legend
from taktline.render.trace import to_trace
from taktline.text import counted


class By(StrEnum):
    """The meaning of a column of the terminal."""

    time = auto()
    step = auto()


def show(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|NAME…",
            help="Plans, timelines or schedules to draw.",
            autocompletion=complete,
        ),
    ],
    *,
    times: Times,
    predict: Predict = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write to this file: .svg, .html (interactive) or .json (for Perfetto).",
        ),
    ] = None,
    by: Annotated[
        By, typer.Option(help="In the terminal: time draws to scale, step every action.")
    ] = By.time,
    width: Annotated[
        int | None,
        typer.Option(min=20, help="Width: columns of the terminal, or pixels of an SVG."),
    ] = None,
    colour: Colour = None,
) -> None:
    """Draw plans: in the terminal, as SVG, as an HTML page, or as a trace for Perfetto.

    Times are for a rank's whole share of the model, so that schedules can be compared. Files with
    costs keep their own, and timelines are drawn as they are.

    Examples:

    - `taktline show 1f1b`

    - `taktline show plan.csv --by step`

    - `taktline show 1f1b zbv -r 4 -m 8 -o compare.html`

    - `taktline show measured.json --predict`

    - `taktline show dualpipev -r 4 -m 10 --forward 1 --backward 1.1 --comm 0.1 -o plan.svg`
    """
    timelines = times.timelines(targets, predict=predict)
    if output is None:
        _print(timelines, by, width, colour)
    else:
        _write(timelines, output, width)


def _print(timelines: list[Timeline], by: By, width: int | None, colour: bool | None) -> None:
    screen = console(colour)
    painted = screen.color_system is not None and not screen.no_color
    if by is By.time:
        typer.echo(chart(timelines, width, colour=painted), color=True)
    else:
        for timeline in timelines:
            typer.echo(grid(timeline.plan, width, colour=painted), color=True)
    typer.echo(legend(colour=painted), color=True)
    if by is By.time:
        typer.echo(MEMORY)


def _write(timelines: list[Timeline], output: Path, width: int | None) -> None:
    ending = output.suffix.lower()
    if ending == ".json":
        write_text(output, to_trace(timelines))
    elif ending in (".svg", ".html"):
        save(timelines, output, width=width)
    else:
        raise ArgumentError(
            f"drawings are .svg, .html or .json (for Perfetto), not {ending or output.name!r}"
        )
    typer.echo(f"{output}: {counted(len(timelines), 'timeline')}")
