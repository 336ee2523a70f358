"""From 2 to 32 processes over gloo: to build, to step, and to hear of a death; torch and Taktline.

    python benchmarks/scale.py                    2 to 16 processes (about three minutes)
    python benchmarks/scale.py --ranks 8 32       others

Each process has one layer, and 1F1B twice as many micro-batches as there are processes. Each line
is a set of fresh processes: in torch each makes its stage, in Taktline ``Pipeline`` cuts the model,
compares it over all ranks, and connects. Times are those of the slowest process. Then one of them
is killed in the middle of a step, and the others step on until they get an error.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import signal
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as peer
from torch import nn

import taktline as tl

WIDTH, ROWS, STEPS = 64, 4, 10
SOON = 20.0
"""How long the others may take until they hear of a death, in seconds."""
PIPELINE = tl.Pipeline
"""Imported before processes are forked, as all of torch is."""


def of_torch(rank: int, ranks: int) -> Callable[[torch.Tensor], object]:
    """A function that runs a step, in torch."""
    stage = peer.PipelineStage(nn.Linear(WIDTH, WIDTH), rank, ranks, torch.device("cpu"))
    schedule = peer.Schedule1F1B(stage, 2 * ranks, loss_fn=nn.functional.mse_loss)

    def step(batch: torch.Tensor) -> None:
        args = (batch,) if rank == 0 else ()
        schedule.step(*args, target=batch if rank == ranks - 1 else None)

    return step


def of_taktline(rank: int, ranks: int) -> Callable[[torch.Tensor], object]:
    """The same in Taktline, which cuts the model."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(ranks)])
    pipe = PIPELINE(
        model,
        example=(torch.zeros(ROWS, WIDTH),),
        schedule="1f1b",
        microbatches=2 * ranks,
        loss_fn=nn.functional.mse_loss,
    )
    return lambda batch: pipe.step(batch, target=batch)


RUNTIMES = {"torch": of_torch, "taktline": of_taktline}


def serve(runtime: str, rank: int, ranks: int, path: str, pipe: Connection) -> None:
    """One process: what it measures goes through the pipe."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    batch = torch.randn(2 * ranks * ROWS, WIDTH)
    marks = list[float]()

    def mark() -> None:
        marks.append(time.monotonic())
        dist.barrier()

    dist.barrier()
    mark()
    step = RUNTIMES[runtime](rank, ranks)
    mark()
    step(batch)
    mark()
    for _ in range(STEPS):
        step(batch)
    mark()
    pipe.send(marks)
    pipe.recv()
    try:
        while True:
            step(batch)
    except BaseException as error:
        pipe.send((time.monotonic(), type(error).__name__))
    pipe.recv()
    os._exit(0)  # so that nobody says goodbye


def measured(runtime: str, ranks: int) -> tuple[list[float], float | None]:
    """Seconds to build, for the first step and for a later one; and until all know of a death."""
    context = mp.get_context("fork")
    pipes: list[Any] = []
    processes: list[Any] = []
    with TemporaryDirectory() as folder:
        for rank in range(ranks):
            here, there = context.Pipe()
            given = (runtime, rank, ranks, f"{folder}/store", there)
            processes.append(context.Process(target=serve, args=given, daemon=True))
            processes[-1].start()
            pipes.append(here)
        marks = [pipe.recv() for pipe in pipes]
        ends = [max(column) for column in zip(*marks, strict=True)]
        build, first, steps = (after - before for before, after in pairwise(ends))
        for pipe in pipes:
            pipe.send(None)
        time.sleep(0.5)
        victim = ranks // 2
        struck = time.monotonic()
        os.kill(processes[victim].pid, signal.SIGKILL)
        left = [pipe for rank, pipe in enumerate(pipes) if rank != victim]
        deadline = time.monotonic() + SOON
        heard = [p.recv() for p in left if wait([p], max(0.0, deadline - time.monotonic()))]
        for process in processes:
            process.kill()
            process.join()
    knew = max(at for at, _ in heard) - struck if len(heard) == len(left) else None
    return [build, first, steps / STEPS], knew


def main() -> None:
    """Print a line for each number of processes and runtime."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3, help="sets of processes each; medians")
    options = parser.parse_args()
    for ranks in options.ranks:
        found: dict[str, list[tuple[list[float], float | None]]] = {name: [] for name in RUNTIMES}
        for _ in range(options.rounds):
            for name, results in found.items():
                results.append(measured(name, ranks))
        for name, results in found.items():
            columns = zip(*[times for times, _ in results], strict=True)
            build, first, later = map(statistics.median, columns)
            deaths = [knew for _, knew in results]
            known = [knew for knew in deaths if knew is not None]
            death = f"{max(known):6.2f} s" if len(known) == len(deaths) else f"over {SOON:.0f} s"
            print(
                f"{ranks:3} processes  {name:9} build {build:6.2f} s   first step {first:6.2f} s   "
                f"together {build + first:6.2f} s   step {1000 * later:8.1f} ms   "
                f"all know of a death after {death}",
                flush=True,
            )


if __name__ == "__main__":
    main()
