"""The whole examination, in order; it ends early if a check fails that all others need."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from taktline.cli.doctor import links, machine
from taktline.cli.doctor.rendezvous import Rendezvous, alarm
from taktline.cli.doctor.report import Finding, MeasuredLink, Report, Run, of_ranks
from taktline.device import keep_generators
from taktline.errors import TaktlineError
from taktline.plan import find
from taktline.train import Pipeline
from taktline.transport import local, transport_of

_NEEDED = ("backend", "GPUs")
"""Without these checks there can be no process group."""
_SCHEDULES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
_WIDTH = 32
_STEPS = 3


def examine(backend: str | None, timeout: float) -> tuple[Report, Rendezvous]:
    """Examine as a rank that a launcher has started."""
    rank = int(os.environ["RANK"])
    chosen, device = machine.choose(backend)
    with alarm(rank, 2 * timeout, "looking for the other ranks"):
        rendezvous = Rendezvous(timeout)
        ranks = rendezvous.share_facts(machine.describe(rank, chosen, device))
    report = Report(chosen, ranks)
    if rendezvous.missing:
        report.findings.append(_missing(rendezvous))
        return report, rendezvous
    report.findings += machine.judge(ranks)
    if any(f.verdict == "failed" and f.check in _NEEDED for f in report.findings):
        return report, rendezvous
    within = partial(alarm, rank, timeout)
    try:
        with within("making a process group"):
            transport = transport_of(rendezvous.group(chosen, device), device)
        _check_together(report, lambda: links.measure(transport, device), device, within)
        with within("parting"):
            dist.destroy_process_group()
    except Exception as error:
        report.findings.append(_broken(rank, error))
    return report, rendezvous


def examine_local(size: int) -> Report:
    """Examine local ranks, which take turns in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = [machine.describe(rank, "local", device) for rank in range(size)]
    report = Report("local", ranks, list(machine.judge(ranks)))

    def measured() -> list[MeasuredLink]:
        return local.run(lambda _: links.measure(transport_of(None, device), device), size)[0]

    # Local ranks notice a deadlock by themselves, and need no alarm.
    _check_together(report, measured, device, nullcontext)
    return report


def _check_together(
    report: Report,
    measured: Callable[[], list[MeasuredLink]],
    device: torch.device,
    within: Callable[[str], AbstractContextManager[Any]],
) -> None:
    """Run the checks that take all ranks together, links and pipelines, each ``within`` a phase."""
    with within("measuring links"):
        report.links = measured()
    report.findings += links.judge(report.links)
    for schedule in _SCHEDULES:
        with within(f"running {schedule}"):
            report.runs.append(try_schedule(schedule, len(report.ranks), device))
    report.findings += judge_runs(report.runs)


def try_schedule(name: str, ranks: int, device: torch.device) -> Run:
    """Compare a step of a tiny pipeline with the plain model, and time a few more steps."""
    per_rank, microbatches = find(name).stages_per_rank or 2, 2 * ranks
    with keep_generators([device]):  # the same on every rank
        torch.manual_seed(0)
        layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(ranks * per_rank)]
        x, target = torch.randn(2, 4 * microbatches, _WIDTH).to(device)
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
            for _ in range(_STEPS):
                begin = perf_counter()
                pipe.step(x, target=target).item()  # which waits for a GPU
                times.append(perf_counter() - begin)
    except TaktlineError as error:  # every rank raises the same
        return Run(name, per_rank, error=str(error))
    return Run(name, per_rank, median(times), "" if found else str(found))


def judge_runs(runs: Sequence[Run]) -> Iterator[Finding]:
    """Whether every schedule ran, with the gradients of the plain model."""
    for run in runs:
        if run.error:
            yield Finding("schedules", "failed", f"{run.schedule}: {run.error}", "see the error")
        elif run.wrong:
            text = f"{run.schedule}: differs from the plain model: {run.wrong}"
            advice = "check that every rank runs the same torch; look for broken memory"
            yield Finding("schedules", "failed", text, advice)
    if not any(run.error or run.wrong for run in runs):
        text = f"{len(runs)} schedules ran, with the plain model's gradients"
        yield Finding("schedules", "ok", text)


def _broken(rank: int, error: Exception) -> Finding:
    # gloo puts a place in its source before its message, and an advice of its own behind it.
    reason = re.sub(r"\[[^\]]*\.(cc|cpp|h|hpp):\d+\] ?", "", str(error))
    reason = reason.split(". This is typically")[0].split("\nException raised from")[0].strip()
    return Finding(
        "connection",
        "failed",
        f"broke on rank {rank} while {error.__notes__[-1]}: {reason or type(error).__name__}",
        "see what the other ranks say, and whether every host can reach every other one "
        "(firewalls, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
    )


def _missing(rendezvous: Rendezvous) -> Finding:
    return Finding(
        "ranks",
        "failed",
        f"{of_ranks(rendezvous.missing)} of {rendezvous.size} did not arrive within "
        f"{rendezvous.timeout:g} s",
        "see whether the launcher has started them, what they say, and whether "
        f"{rendezvous.address} can be reached from there; --timeout waits longer",
    )
