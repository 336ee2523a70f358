"""What a runtime costs beside the work itself: step() less bare autograd, on tiny layers.

    python benchmarks/overhead.py                 1 rank, then 2 (about a minute)
    python benchmarks/overhead.py --ranks 2

Bare autograd is what a rank would do without a pipeline: for each micro-batch the forward of its
stages, the loss if it has the last one, and the backward. No step is shorter than that of the rank
with the most work. The rest, divided by the stages and micro-batches of a rank, is overhead; over
two ranks it contains the messages and the bubble. Both runtimes take turns; medians of what they
took above bare autograd in the same round.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from _figures import TITLES, record
from _peers import RUNTIMES, SCHEDULES, make_schedule, run_ranks
from torch import nn

WIDTH, STEPS = 16, 5


def layer() -> nn.Module:
    """A tiny stage: hardly any work, so that what is left is overhead."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def bare(modules: list[nn.Module], chunks: Sequence[torch.Tensor], last: bool) -> None:
    """The same work without a pipeline."""
    for chunk in chunks:
        output = chunk
        for module in modules:
            output = module(output)
        if last:
            nn.functional.mse_loss(output, chunk).backward()
        else:
            output.backward(torch.ones_like(output))


def measure(rank: int, ranks: int, rounds: int, microbatches: int, names: Sequence[str]) -> None:
    """Print a line for each schedule."""
    batch = torch.randn(2 * microbatches, WIDTH)
    for name in names:
        per_rank = SCHEDULES[name]
        calls: dict[str, Callable[[], object]] = {}
        for key, runtime in RUNTIMES.items():
            schedule, modules, first, last = make_schedule(
                runtime, name, rank, ranks, microbatches, layer
            )
            args = (batch,) if first else ()
            target = batch if last else None
            calls[key] = lambda step=schedule.step, args=args, target=target: step(
                *args, target=target, return_outputs=False
            )
            calls["bare"] = lambda modules=modules, last=last: bare(
                modules, batch.tensor_split(microbatches), last
            )
        gc.disable()  # as timeit does
        times: dict[str, list[float]] = {key: [] for key in calls}
        for number in range(rounds + 1):
            for key, call in [*calls.items()][:: -1 if number % 2 else 1]:
                gc.collect()
                dist.barrier()
                call()  # warms up, after the others' turn
                start = time.perf_counter()
                for _ in range(STEPS):
                    call()
                if number:  # in the first round, shapes are learned
                    times[key].append((time.perf_counter() - start) / STEPS)
        everywhere: list[list[float]] = [[] for _ in range(ranks)]
        dist.all_gather_object(everywhere, times["bare"])
        times["bare"] = [max(taken) for taken in zip(*everywhere, strict=True)]
        unit = 1e6 / (per_rank * microbatches)
        cost = {"bare": statistics.median(times["bare"]) * unit}
        for key in RUNTIMES:
            above = [taken - least for taken, least in zip(times[key], times["bare"], strict=True)]
            cost[key] = statistics.median(above) * unit
        if rank == 0:
            label = f"{name.removeprefix('Schedule'):22} {ranks} rank{'s' * (ranks > 1)}"
            told = "   ".join(f"{key} {value:7.1f}" for key, value in cost.items())
            print(f"{label:32} {told}   ratio {cost['taktline'] / cost['torch']:.2f}", flush=True)
            if ranks <= 2:
                record(f"overhead-{ranks}", TITLES[name], {key: cost[key] for key in RUNTIMES})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    options = parser.parse_args()
    sizes = f"{options.microbatches} micro-batches, {options.rounds} rounds"
    print(f"µs per stage and micro-batch; {sizes}")
    for ranks in options.ranks:
        run_ranks(measure, ranks, options.rounds, options.microbatches, options.schedules)
