"""Steps that wait for all ranks against steps that run ahead, over processes.

    python benchmarks/run_ahead.py
    python benchmarks/run_ahead.py --ranks 4 --milliseconds 30

Stages sleep for as long as they would compute, so that the ranks need no cores of their own: the
time of a step is that of its schedule. Beside the measured bubbles stand those of the simulation:
from the first action of any rank to the last one, and of the longest of the ranks' own spans.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.multiprocessing.spawn import spawn

import taktline as tl
from taktline.plan import Costs, build, simulate

SCHEDULES = ("1f1b", "zb_h1", "zb_h2", "zbv")
STEPS, WARM = 15, 4


class SleepingStage(tl.PipelineStage):
    """A stage whose actions take as long as was asked for."""

    seconds = 0.0

    def keep(
        self, microbatch: int, inputs: Sequence[torch.Tensor], roots: Sequence[torch.Tensor]
    ) -> None:
        """The end of F."""
        time.sleep(self.seconds)
        super().keep(microbatch, inputs, roots)

    def backward(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """B."""
        time.sleep(2 * self.seconds)
        return super().backward(microbatch, gradients)

    def backward_input(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """I."""
        time.sleep(self.seconds)
        return super().backward_input(microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        time.sleep(self.seconds)
        super().backward_weight(microbatch)


def rank_of(rank: int, ranks: int, port: int, milliseconds: float, lines: Any) -> None:
    """One rank: every schedule with and without waiting."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for name in SCHEDULES:
        found = [step_seconds(name, rank, ranks, milliseconds / 1e3, ahead) for ahead in (0, 1)]
        if rank == 0:
            lines.put((name, found))
    dist.destroy_process_group()


def step_seconds(name: str, rank: int, ranks: int, seconds: float, ahead: int) -> float:
    """The median time of a step."""
    plan = build(name, ranks=ranks, microbatches=2 * ranks)
    stages: list[tl.PipelineStage] = []
    for stage in plan.placement.stages_of(rank):
        made = SleepingStage(nn.Linear(4, 4), stage, plan.stages, torch.device("cpu"))
        made.seconds = seconds / (plan.stages // ranks)
        stages.append(made)
    schedule = tl.ScheduleFromPlan(stages, plan, nn.functional.mse_loss, run_ahead=bool(ahead))
    x = torch.ones(2 * ranks, 4)
    ends: list[float] = []
    for _ in range(WARM + STEPS):
        schedule.step(x, target=x, return_outputs=False)
        ends.append(time.perf_counter())
    times = [after - before for before, after in zip(ends[WARM:-1], ends[WARM + 1 :], strict=True)]
    dist.barrier()
    return statistics.median(times)


def line(name: str, ranks: int, milliseconds: float, found: Sequence[float]) -> str:
    """The bubbles of a schedule."""
    plan = build(name, ranks=ranks, microbatches=2 * ranks)
    timeline = simulate(plan, Costs(forward=1, backward_input=1, backward_weight=1))
    busy = 3 * 2 * ranks * milliseconds / 1e3
    waits, ahead = (1 - busy / seconds for seconds in found)
    return (
        f"{name:8} waiting: {waits:6.1%} (simulated {timeline.bubble():6.1%})   "
        f"run_ahead: {ahead:6.1%} (simulated {timeline.bubble('span'):6.1%})   "
        f"{found[1] / found[0]:.3f} of the time"
    )


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--milliseconds", type=float, default=30.0)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    lines = mp.get_context("spawn").SimpleQueue()
    print(
        f"bubbles on {options.ranks} ranks, {2 * options.ranks} micro-batches, "
        f"F = I = W = {options.milliseconds} ms"
    )
    given = (options.ranks, port, options.milliseconds, lines)
    running = spawn(rank_of, given, nprocs=options.ranks, join=False)
    for _ in SCHEDULES:
        name, found = lines.get()
        print(line(name, options.ranks, options.milliseconds, found), flush=True)
    while running is not None and not running.join():
        pass


if __name__ == "__main__":
    main()
