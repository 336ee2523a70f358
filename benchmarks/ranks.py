"""Steps over several processes: torch.distributed.pipelining and Taktline in turns.

    python benchmarks/ranks.py                                 2 ranks over gloo (about a minute)
    python benchmarks/ranks.py --backend nccl --ranks 4        over nccl, on one GPU or several

Both runtimes have the same stages and take turns. What is printed is the median time of a step,
their ratio, its noise, and how long the first step took. The noise is by how much the medians of
torch's even and odd steps differ.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from _peers import RUNTIMES, SCHEDULES, make_schedule, run_ranks
from torch import nn

SIZES = {"gloo": (512, 16), "nccl": (2048, 512)}
"""How wide layers are, and the rows of a micro-batch."""
MICROBATCHES = 8


def layer(width: int) -> nn.Module:
    """A stage of some work."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def timed(call: Callable[[], object], backend: str) -> float:
    """How long a step takes, all ranks and what they have told a GPU included."""
    dist.barrier()
    start = time.perf_counter()
    call()
    if backend == "nccl":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - start


def measure(rank: int, ranks: int, backend: str, rounds: int, names: list[str]) -> None:
    """Print a line for each schedule."""
    device = "cuda" if backend == "nccl" else "cpu"
    width, rows = SIZES[backend]
    batch = torch.randn(rows * MICROBATCHES, width, device=device)
    for name in names:
        calls: dict[str, Callable[[], object]] = {}
        for key, runtime in RUNTIMES.items():
            make = partial(layer, width)
            schedule, _, first, last = make_schedule(
                runtime, name, rank, ranks, MICROBATCHES, make, device
            )
            args = (batch,) if first else ()
            target = batch if last else None
            calls[key] = partial(schedule.step, *args, target=target, return_outputs=False)
        first_steps = {key: timed(call, backend) for key, call in calls.items()}
        times: dict[str, list[float]] = {key: [] for key in calls}
        gc.disable()
        for _ in range(rounds):
            for key, call in calls.items():
                timed(call, backend)  # warms up, after the other one's turn
                times[key].append(timed(call, backend))
        if rank == 0:
            steps = {key: 1000 * statistics.median(values) for key, values in times.items()}
            told = "   ".join(f"{key} {value:7.2f}" for key, value in steps.items())
            begun = "   ".join(f"{key} {value:5.2f}" for key, value in first_steps.items())
            ratio = steps["taktline"] / steps["torch"]
            halves = [statistics.median(times["torch"][half::2]) for half in (0, 1)]
            noise = 1000 * abs(halves[0] - halves[1]) / steps["torch"]
            label = name.removeprefix("Schedule")
            print(
                f"{label:22} {told}   ratio {ratio:.3f}, noise {noise:.3f}   "
                f"first step, s: {begun}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=list(SIZES), default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    options = parser.parse_args()
    print(
        f"ms per step; {options.ranks} ranks over {options.backend}, {MICROBATCHES} micro-batches"
    )
    given = options.backend, options.rounds, options.schedules
    run_ranks(measure, options.ranks, *given, backend=options.backend)
