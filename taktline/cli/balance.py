"""``taktline balance``: layers cut into stages."""

from __future__ import annotations

from typing import Annotated

import typer

from taktline.cli.options import Json, echo_json
from taktline.errors import ArgumentError
from taktline.plan import balance as cut_evenly


def balance(
    costs: Annotated[str, typer.Argument(help="Cost of each layer, such as 3,1,4.")],
    stages: Annotated[int, typer.Option(help="Number of stages.")],
    memory: Annotated[
        str | None, typer.Option(help="Memory of each layer, such as 8,8,16.")
    ] = None,
    limits: Annotated[
        str | None, typer.Option(help="Memory limit of a stage: one number, or one per stage.")
    ] = None,
    json: Json = False,
) -> None:
    """Cut layers into stages, so that the largest is as small as possible.

    Example: `taktline balance 5,3,3,3,3,3,9 --stages 3`
    """
    each = None if limits is None else _numbers(limits)
    cut = cut_evenly(
        _numbers(costs),
        stages,
        memory=None if memory is None else _numbers(memory),
        limits=each[0] if each is not None and len(each) == 1 else each,
    )
    if not json:
        typer.echo(str(cut))
        return
    values = {"largest": cut.largest, "bounds": cut.bounds, "stage_costs": cut.stage_costs}
    if cut.stage_memory is not None:
        values["stage_memory"] = cut.stage_memory
    echo_json(values)


def _numbers(text: str) -> list[float]:
    """Numbers with commas between them; whole ones stay whole, and so exact."""
    numbers: list[float] = []
    for word in text.split(","):
        try:
            numbers.append(int(word) if word.strip().isdecimal() else float(word))
        except ValueError:
            raise ArgumentError(
                f"expected numbers with commas between them, not {word!r} in {text!r}"
            ) from None
    return numbers
