"""A tiny pipeline under each schedule: does it run, are its gradients right, how long is a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter

import torch
from torch import nn

from taktline.cli.diagnosis.report import Finding, Run, Verdict
from taktline.errors import TaktlineError
from taktline.plan import find
from taktline.train import Pipeline

__all__ = ["SCHEDULES", "judge", "try_schedule"]

SCHEDULES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
WIDTH = 32
STEPS = 3


def try_schedule(name: str, ranks: int, device: torch.device) -> Run:
    """Compare a step with the plain model, and train a few more; every rank takes part."""
    per_rank, microbatches = find(name).stages_per_rank or 2, 2 * ranks
    with torch.random.fork_rng():  # the same on every rank
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(ranks * per_rank)]
        x, target = torch.randn(2, 4 * microbatches, WIDTH).to(device)
    model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))
    try:
        with Pipeline(
            list(model) if len(model) > 1 else model,  # cut by hand, which is quick
            schedule=name,
            microbatches=microbatches,
            loss_fn=nn.functional.mse_loss,
            ranks=ranks,
            device=device,
        ) as pipe:
            found = pipe.verify(model, x, target=target)
            times: list[float] = []
            for _ in range(STEPS):
                begin = perf_counter()
                pipe.step(x, target=target).item()  # which waits for a GPU
                times.append(perf_counter() - begin)
    except TaktlineError as error:  # every rank raises the same
        return Run(name, per_rank, error=str(error))
    return Run(name, per_rank, median(times), "" if found else str(found))


def judge(runs: Sequence[Run]) -> Iterator[Finding]:
    """Whether every schedule ran and was right."""
    for run in runs:
        if run.error:
            text, advice = run.error, "see the error"
        elif run.wrong:
            text = f"differs from the plain model: {run.wrong}"
            advice = "check that every rank runs the same torch; look for broken memory"
        else:
            continue
        yield Finding("schedules", Verdict.FAILED, f"{run.schedule}: {text}", advice)
    if runs and all(run.good for run in runs):
        text = f"{len(runs)} schedules ran, with the plain model's gradients"
        yield Finding("schedules", Verdict.OK, text)
