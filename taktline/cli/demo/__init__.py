"""``taktline demo``: trains a small model on a pipeline."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from taktline.checks import launched
from taktline.cli.launch import launch
from taktline.plan import build

_PATIENCE = 5.0


def demo(
    ranks: Annotated[int, typer.Option("--ranks", "-r", help="Number of ranks.")] = 2,
    schedule: Annotated[str, typer.Option("--schedule", help="Schedule to train with.")] = "1f1b",
    microbatches: Annotated[
        int, typer.Option("--microbatches", "-m", max=1024, help="Number of micro-batches.")
    ] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 150,
    local: Annotated[bool, typer.Option("--local", help="Run all ranks in this process.")] = False,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File for the page of timelines.")
    ] = Path("taktline-demo.html"),
) -> None:
    """Train a small GPT on a pipeline: about a minute on two cores, with nothing to download.

    It learns to write like Taktline's own source code. Then the demo compares its losses with plain
    training, measures three schedules and compares them with their predictions, and writes a page
    of timelines.

    Examples:

    - `taktline demo`

    - `taktline demo --ranks 4 --schedule zbv --local`
    """
    # Raises here, and not on each rank.
    plan = build(schedule, ranks=ranks, microbatches=microbatches)
    if not (local or launched()):
        words = ["demo", "--ranks", str(ranks), "--schedule", schedule]
        words += ["--microbatches", str(microbatches), "--steps", str(steps)]
        words += ["--output", str(output)]
        raise typer.Exit(launch(ranks, words, _PATIENCE))
    if launched() and "TORCHELASTIC_RUN_ID" not in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends this process
    # Here, because it imports torch.
    from taktline.cli.demo.tour import Tour

    size = ranks if local else int(os.environ["WORLD_SIZE"])
    Tour(size, plan.name, microbatches, steps, output, local).run()
