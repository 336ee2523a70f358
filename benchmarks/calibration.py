"""How well the simulator predicts a step with the costs found in a measured one.

    python benchmarks/calibration.py [--steps 9]

Two gloo ranks with one thread each run every schedule on layers large enough that computing
dominates. Some steps are traced. From half of them (every other one) come the costs; the prediction
is that of the simulator for the same plan, and is compared with the other half: medians in
milliseconds. ``step()`` is the time of the whole call without a trace, agreement and all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from _peers import make_schedule, run_ranks
from torch import nn

import taktline as tl

SCHEDULES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
MICROBATCHES, ROWS, WIDTH, LAYERS = 8, 256, 512, 4


def layer() -> nn.Module:
    """A stage in which computing takes some milliseconds."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
    )


def timed(step: Callable[..., object], args: tuple[torch.Tensor, ...], target: object) -> float:
    """How long a step takes, in milliseconds."""
    dist.barrier()
    start = time.perf_counter()
    step(*args, target=target, return_outputs=False)
    return 1e3 * (time.perf_counter() - start)


def measure(rank: int, ranks: int, steps: int) -> None:
    """Print a line for each schedule."""
    batch = torch.randn(MICROBATCHES * ROWS, WIDTH)
    for name in SCHEDULES:
        schedule, _, first, last = make_schedule(tl, name, rank, ranks, MICROBATCHES, layer)
        args, target = (batch,) if first else (), batch if last else None

        step = partial(timed, schedule.step, args, target)
        for _ in range(3):  # shapes are learned, and memory is found
            step()
        calls: list[float] = []
        traced: list[tl.Timeline] = []
        for _ in range(2 * steps):
            calls.append(step())
            with schedule.trace() as trace:
                step()
            traced += trace.timelines
        if rank == 0:
            show(name, calls, traced)


def show(name: str, calls: list[float], traced: list[tl.Timeline]) -> None:
    """Compare what half of the timelines predict with the other half."""
    known, others = traced[::2], traced[1::2]
    predicted = tl.simulate(known[0].plan, tl.Costs.from_timeline(*known))
    measured = statistics.median(timeline.makespan for timeline in others)
    bubble = statistics.median(timeline.bubble() for timeline in others)
    print(
        f"{name.removeprefix('Schedule'):22}{statistics.median(calls):10.2f}{measured:10.2f}"
        f"{predicted.makespan:11.2f}{predicted.makespan / measured:7.3f}"
        f"{bubble:12.1%}{predicted.bubble():11.1%}",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=9)
    options = parser.parse_args()
    print(f"2 ranks, {MICROBATCHES} micro-batches; medians of {options.steps} steps")
    print(
        f"{'':22}{'step()':>10}{'measured':>10}{'predicted':>11}{'ratio':>7}"
        f"{'bubble':>12}{'predicted':>11}"
    )
    run_ranks(measure, 2, options.steps)
