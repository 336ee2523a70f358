"""``taktline demo`` and ``taktline doctor``: ranks are started here if no launcher has.

Torch is imported when they run, so that the other commands start quickly.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from taktline.checks import launched
from taktline.cli.options import OUTPUT, Json, echo_json
from taktline.errors import ArgumentError, TransportError
from taktline.plan import build

COMMAND = ("-m", "taktline")
_POLL = 0.1


def demo(
    ranks: int = typer.Option(2, "--ranks", "-r", help="Number of ranks."),
    schedule: str = typer.Option("1f1b", help="Schedule to train with."),
    microbatches: int = typer.Option(
        8, "--microbatches", "-m", max=1024, help="Number of micro-batches."
    ),
    steps: int = typer.Option(150, min=1, help="Number of training steps."),
    local: bool = typer.Option(False, "--local", help="Run all ranks in this process."),
    output: Path = typer.Option(
        Path("taktline-demo.html"), *OUTPUT, help="File for the page of timelines."
    ),
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
        words = ["demo", "--ranks", str(ranks), "--schedule", schedule, "--steps", str(steps)]
        words += ["--microbatches", str(microbatches), "--output", str(output)]
        raise typer.Exit(launch(ranks, words, patience=5.0))
    if launched() and "TORCHELASTIC_RUN_ID" not in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends this process
    from taktline.cli.demo import Tour

    size = ranks if local else int(os.environ["WORLD_SIZE"])
    Tour(size, plan.name, microbatches, steps, output, local, called()).run()


def doctor(
    ranks: int | None = typer.Option(
        None, "--ranks", "-r", min=1, help="Number of ranks to start here (default 2)."
    ),
    backend: str | None = typer.Option(
        None, help="gloo or nccl; by default nccl if there is a GPU per rank."
    ),
    timeout: float = typer.Option(
        60.0, min=1.0, help="Seconds to wait for a rank before giving up."
    ),
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
    if launched() and ranks is not None:
        raise ArgumentError("a launcher has started the ranks; leave out --ranks")
    if not launched():
        words = ["doctor", "--backend", backend or "gloo", "--timeout", str(timeout)]
        raise typer.Exit(launch(ranks or 2, words + ["--json"] * json, patience=timeout + 20.0))
    # Set before torch is loaded: the doctor reports failures itself, without C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from taktline.cli.doctor import examine

    try:
        report = examine(backend, timeout)
    except TransportError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if os.environ["RANK"] == "0":
        echo_json(report.to_dict()) if json else report.show()
    if report.count("failed"):
        raise typer.Exit(1)


def called() -> str:
    """How a user of this Python calls ``taktline`` from the folder that they are in."""
    script = shutil.which("taktline", path=os.path.dirname(sys.executable))
    if script is not None and shutil.which("taktline") == script:
        return "taktline"
    return f"{os.path.relpath(sys.executable)} -m taktline"


def launch(ranks: int, words: Sequence[str], patience: float) -> int:
    """Run ``python -m taktline`` with these words on each rank; returns one exit code for all.

    Once a rank has failed, the others have ``patience`` seconds to report what they miss.
    """
    threads = max(1, (os.cpu_count() or 1) // ranks)
    common = os.environ | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    command = [sys.executable, *COMMAND, *words]
    processes = [
        subprocess.Popen(command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    end = math.inf
    try:
        while time.monotonic() < end and any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                end = min(end, time.monotonic() + patience)
            time.sleep(_POLL)
        return int(any(process.poll() != 0 for process in processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
