"""``taktline doctor``: whether the ranks of a cluster can train together."""

from __future__ import annotations

import os
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from taktline.checks import launched
from taktline.cli.launch import launch
from taktline.cli.options import Json, echo_json
from taktline.errors import ArgumentError, TransportError
from taktline.plan.io import write_text

if TYPE_CHECKING:  # importing it takes time: the other commands must not pay for the doctor
    from taktline.cli.doctor.report import Report


def doctor(
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-r", min=1, help="Number of ranks to start here (default 2)."),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Run all ranks in this process.")] = False,
    backend: Annotated[
        str | None, typer.Option(help="gloo or nccl; by default nccl if there is a GPU per rank.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds to wait for a rank before giving up.")
    ] = 60.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Also write the results to this .json file."),
    ] = None,
    json: Json = False,
) -> None:
    """Check a cluster: versions, devices, links between ranks, and a tiny pipeline.

    Start it like your training, on all machines; without a launcher, it checks this machine alone.
    Exits with 1 if a check failed.

    Examples:

    - `torchrun --nproc-per-node 4 -m taktline doctor`

    - `taktline doctor --ranks 4`
    """
    if backend not in (None, "gloo", "nccl"):
        raise ArgumentError(f"--backend must be gloo or nccl, not {backend!r}")
    if launched():
        if ranks is not None or local:
            raise ArgumentError("a launcher has started the ranks; leave out --ranks, --local")
        well = _as_a_rank(backend, timeout, output, json)
    elif local:
        if backend is not None:
            raise ArgumentError("local ranks need no --backend")
        from taktline.cli.doctor.examine import examine_local

        well = _print(examine_local(ranks or 2), output, json)
    else:
        words = ["doctor", "--backend", backend or "gloo", "--timeout", str(timeout)]
        words += [] if output is None else ["--output", str(output)]
        words += ["--json"] if json else []
        well = launch(ranks or 2, words, patience=timeout + 20.0) == 0
    if not well:
        raise typer.Exit(1)


def _as_a_rank(backend: str | None, timeout: float, output: Path | None, json: bool) -> bool:
    """Examine as a rank that a launcher has started; returns whether all is well."""
    # Set before torch is loaded: the doctor reports failures itself, without C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from taktline.cli.doctor.examine import examine

    try:
        report, rendezvous = examine(backend, timeout)
    except TransportError as error:
        typer.echo(f"error: {error}", err=True)
        return False
    if rendezvous.rank == 0:
        _print(report, output, json)
    rendezvous.leave()
    return report.well


def _print(report: Report, output: Path | None, json: bool) -> bool:
    """Print the findings, and write them to a file if asked to; returns whether all is well."""
    from rich.console import Console

    from taktline.cli.doctor.report import show

    if json:
        echo_json(report.to_dict())
    else:
        show(report, Console())
    if output is not None:
        write_text(output, dumps(report.to_dict(), indent=2) + "\n")
        typer.echo(f"{output}: the findings", err=json)
    return report.well
