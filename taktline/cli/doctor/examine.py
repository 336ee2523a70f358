"""The whole examination, in order; it ends early if a check fails that all others need."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn

from taktline.cli.doctor import links, machine
from taktline.cli.doctor.rendezvous import Rendezvous, alarm
from taktline.cli.doctor.report import Finding, MeasuredLink, Report, Run, Verdict, of_ranks
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
    chosen = machine.wanted_backend(backend)
    device = _device(chosen)
    with alarm(int(os.environ["RANK"]), "looking for the other ranks", 2 * timeout):
        rendezvous = Rendezvous(timeout)
        ranks = rendezvous.share_facts(machine.describe(rendezvous.rank, chosen, device))
    report = Report(chosen, ranks)
    if rendezvous.missing:
        report.findings.append(_missing(rendezvous))
        return report, rendezvous
    report.findings += machine.judge(ranks)
    if any(f.verdict == Verdict.FAILED and f.check in _NEEDED for f in report.findings):
        return report, rendezvous
    doing = ""

    def begin(phase: str) -> AbstractContextManager[None]:
        nonlocal doing
        doing = phase
        return alarm(rendezvous.rank, phase, timeout)

    try:
        with begin("making a process group"):
            transport = transport_of(rendezvous.group(chosen, device), device)
        _check_together(report, lambda: links.measure(transport, device), device, begin)
        with begin("parting"):
            dist.destroy_process_group()
    except Exception as error:
        report.findings.append(_broken(rendezvous.rank, doing, error))
    return report, rendezvous


def examine_local(size: int) -> Report:
    """Examine local ranks, which take turns in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = [machine.describe(rank, "local", device) for rank in range(size)]
    report = Report("local", ranks, list(machine.judge(ranks)))
    # Local ranks notice a deadlock by themselves, and need no alarm.
    found = local.run(lambda _: links.measure(transport_of(None, device), device), size)
    _check_together(report, lambda: found[0], device, lambda _: nullcontext())
    return report


def _check_together(
    report: Report,
    measured: Callable[[], list[MeasuredLink]],
    device: torch.device,
    begin: Callable[[str], AbstractContextManager[None]],
) -> None:
    """Run the checks that take all ranks together: links, then pipelines; each within ``begin``."""
    with begin("measuring links"):
        report.links = measured()
    report.findings += links.judge(report.links)
    for schedule in _SCHEDULES:
        with begin(f"running {schedule}"):
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


def _broken(rank: int, doing: str, error: Exception) -> Finding:
    # gloo puts a place in its source before its message, and an advice of its own behind it.
    reason = re.sub(r"\[[^\]]*\.(cc|cpp|h|hpp):\d+\] ?", "", str(error))
    reason = reason.split(". This is typically")[0].split("\nException raised from")[0].strip()
    return Finding(
        "connection",
        Verdict.FAILED,
        f"broke on rank {rank} while {doing}: {reason or type(error).__name__}",
        "see what the other ranks say, and whether every host can reach every other one "
        "(firewalls, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
    )


def _missing(rendezvous: Rendezvous) -> Finding:
    return Finding(
        "ranks",
        Verdict.FAILED,
        f"{of_ranks(rendezvous.missing)} of {rendezvous.size} did not arrive within "
        f"{rendezvous.timeout:g} s",
        "see whether the launcher has started them, what they say, and whether "
        f"{rendezvous.address} can be reached from there; --timeout waits longer",
    )


def _device(backend: str) -> torch.device:
    if backend != "nccl" or not torch.cuda.is_available():
        return torch.device("cpu")
    # With too few GPUs some ranks share one, which a check reports.
    number = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device
