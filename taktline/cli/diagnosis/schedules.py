"""A tiny pipeline under each schedule: does it run, are its gradients right, how long is a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from taktline.cli.diagnosis.report import Finding, Run, Verdict, of_ranks
from taktline.errors import TaktlineError
from taktline.plan import Placement
from taktline.runtime import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from taktline.stage import PipelineStage
from taktline.transport import Transport
from taktline.transport.control import share_floats

__all__ = ["SCHEDULES", "judge", "try_schedule"]

SCHEDULES: dict[Any, tuple[int, bool]] = {
    ScheduleGPipe: (1, False),
    Schedule1F1B: (1, False),
    ScheduleInterleaved1F1B: (2, False),
    ScheduleLoopedBFS: (2, False),
    ScheduleInterleavedZeroBubble: (2, False),
    ScheduleZBVZeroBubble: (2, True),
    ScheduleDualPipeV: (2, True),
}
"""Each with its stages per rank, and whether they lie in a V."""

WIDTH = 32
STEPS = 3
TOLERANCE = 1e-4
"""Relative to the largest gradient: GPUs may add up in another order."""


def try_schedule(
    schedule: Any, transport: Transport, device: torch.device, group: dist.ProcessGroup | None
) -> Run:
    """Train a few steps under a schedule; every rank takes part and gets the same result."""
    per_rank, in_v = SCHEDULES[schedule]
    make = Placement.v if in_v else Placement.loop
    placement = make(transport.size, per_rank)
    name = schedule.__name__
    try:
        seconds, difference = _train(schedule, placement, transport.rank, device, group)
    except TaktlineError as error:
        # Every rank raises the same.
        return Run(name, per_rank, None, None, error=str(error))
    told = share_floats(transport, [seconds, difference], "the doctor's training")
    times, differences = zip(*told, strict=True)
    # Not >: a difference that is no number is wrong, too.
    wrong = tuple(rank for rank, found in enumerate(differences) if not found <= TOLERANCE)
    return Run(name, per_rank, max(times), max(differences), wrong)


def _train(
    schedule: Any,
    placement: Placement,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> tuple[float, float]:
    """Seconds for a step, and the largest difference to the plain model's gradients."""
    microbatches = 2 * placement.ranks
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, 4 * microbatches, WIDTH, generator=generator).to(device)
    modules = [_layer(generator).to(device) for _ in range(placement.stages)]
    expected = _plain(modules, x, target, microbatches)
    mine = placement.stages_of(rank)
    stages = [PipelineStage(modules[s], s, placement.stages, device, group=group) for s in mine]
    single = len(mine) == 1
    pipe = schedule(stages[0] if single else stages, microbatches, F.mse_loss)
    times: list[float] = []
    for _ in range(1 + STEPS):
        for module in modules:
            module.zero_grad()
        _synchronize(device)
        begin = perf_counter()
        pipe.step(x, target=target)
        _synchronize(device)
        times.append(perf_counter() - begin)
    # The first step learns the shapes.
    return median(times[1:]), max(_difference(modules[s], expected[s]) for s in mine)


def _layer(generator: torch.Generator) -> nn.Module:
    """The same on every rank, whatever its device draws."""
    linear = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
    return nn.Sequential(linear, nn.Tanh())


def _plain(
    modules: Sequence[nn.Module], x: torch.Tensor, target: torch.Tensor, microbatches: int
) -> list[list[torch.Tensor]]:
    """The gradients of the model as a whole, stage by stage."""
    for part, wanted in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
        (F.mse_loss(nn.Sequential(*modules)(part), wanted) / microbatches).backward()
    return [
        [p.grad.clone() for p in module.parameters() if p.grad is not None] for module in modules
    ]


def _difference(module: nn.Module, expected: Sequence[torch.Tensor]) -> float:
    """The largest difference of a gradient, relative to the largest gradient."""
    worst = 0.0
    for parameter, wanted in zip(module.parameters(), expected, strict=True):
        if parameter.grad is None:
            return float("inf")
        distance = (parameter.grad - wanted).abs().max() / wanted.abs().max()
        worst = max(worst, distance.item())
    return worst


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def judge(runs: Sequence[Run]) -> Iterator[Finding]:
    """Whether every schedule ran and was right."""
    for run in runs:
        if run.error:
            yield Finding(
                "schedules", Verdict.FAILED, f"{run.schedule}: {run.error}", "see the error"
            )
        elif run.wrong:
            yield Finding(
                "schedules",
                Verdict.FAILED,
                f"{run.schedule}: other gradients than the plain model on {of_ranks(run.wrong)}",
                "check that every rank runs the same torch; look for broken memory",
            )
    if runs and all(run.good for run in runs):
        text = f"{len(runs)} schedules ran, with the plain model's gradients"
        yield Finding("schedules", Verdict.OK, text)
