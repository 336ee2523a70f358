"""How well the simulator predicts a step with the costs found in a measured one.

    python benchmarks/calibration.py [--steps 10]

Two gloo ranks with one thread each run each schedule on layers large enough that computing
dominates. Traced steps take turns with others, whose whole call is timed (``step()``).

``predicted`` is what the simulator makes of the costs found in a step; ``ratio`` compares it with
that step, and ``error`` is how far it is off. ``others`` compares what every other step predicts
together with the steps in between; ``halves`` compares these two halves as they were measured: how
well the machine repeats itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

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
        for _ in range(steps):
            calls.append(step())
            with schedule.trace() as trace:
                step()
            traced += trace.timelines
        if rank == 0:
            show(name, calls, traced)


def show(name: str, calls: list[float], traced: list[tl.Timeline]) -> None:
    """Compare each step with its own prediction, and half of them with that of the other half."""
    predicted = [tl.simulate(timeline.plan, timeline.costs) for timeline in traced]
    ratios = [p.makespan / t.makespan for p, t in zip(predicted, traced, strict=True)]
    others = tl.simulate(traced[0].plan, tl.Costs.from_timeline(*traced[::2]))
    halves = [median(t.makespan for t in traced[at::2]) for at in (0, 1)]
    print(
        f"{name.removeprefix('Schedule'):22}{median(calls):9.2f}"
        f"{median(t.makespan for t in traced):10.2f}{median(p.makespan for p in predicted):11.2f}"
        f"{median(ratios):8.3f}{median(abs(ratio - 1) for ratio in ratios):8.1%}"
        f"{others.makespan / halves[1]:9.3f}{halves[0] / halves[1]:9.3f}"
        f"{median(t.bubble() for t in traced):10.1%}"
        f"{median(p.bubble() for p in predicted):11.1%}",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    print(f"2 ranks, {MICROBATCHES} micro-batches; medians of {options.steps} steps, times in ms")
    print(
        f"{'':22}{'step()':>9}{'measured':>10}{'predicted':>11}{'ratio':>8}{'error':>8}"
        f"{'others':>9}{'halves':>9}{'bubble':>10}{'predicted':>11}"
    )
    run_ranks(measure, 2, options.steps)
