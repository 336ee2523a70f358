"""The whole examination, in order; after what cannot be worked around, it ends early."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from taktline.cli.diagnosis import links, machine, schedules
from taktline.cli.diagnosis.meeting import Meeting, alarm
from taktline.cli.diagnosis.report import Finding, MeasuredLink, Report, Verdict, of_ranks
from taktline.transport import local, transport_of

__all__ = ["examine", "examine_local"]

_NEEDED = ("backend", "GPUs")
"""Without these there can be no process group."""


def examine(backend: str | None, timeout: float) -> tuple[Report, int, Callable[[], None]]:
    """As a rank that a launcher has started: the report, the rank, and how to leave."""
    chosen = machine.wanted_backend(backend)
    device = _device(chosen)
    with alarm(int(os.environ["RANK"]), "looking for the other ranks", 2 * timeout):
        meeting = Meeting(timeout)
        ranks = meeting.introduce(machine.describe(meeting.rank, chosen, device))
    report = Report(chosen, ranks)
    if meeting.missing:
        report.findings.append(_missing(meeting))
        return report, meeting.rank, meeting.part
    report.findings += machine.judge(ranks)
    if any(f.verdict == Verdict.FAILED and f.check in _NEEDED for f in report.findings):
        return report, meeting.rank, meeting.part
    doing = ""

    def begin(phase: str) -> AbstractContextManager[None]:
        nonlocal doing
        doing = phase
        return alarm(meeting.rank, phase, timeout)

    try:
        with begin("making a process group"):
            transport = transport_of(meeting.group(chosen, device), device)
        _look(report, lambda: links.measure(transport, device), device, begin)
        with begin("parting"):
            dist.destroy_process_group()
    except Exception as error:
        report.findings.append(_broken(meeting.rank, doing, error))
    return report, meeting.rank, meeting.part


def _broken(rank: int, doing: str, error: Exception) -> Finding:
    # gloo puts a place in its source before what happened, and good wishes behind it.
    reason = re.sub(r"\[[^\]]*\.(cc|cpp|h|hpp):\d+\] ?", "", str(error))
    reason = reason.split(". This is typically")[0].split("\nException raised from")[0].strip()
    return Finding(
        "connection",
        Verdict.FAILED,
        f"broke on rank {rank} while {doing}: {reason or type(error).__name__}",
        "see what the other ranks say, and whether every host can reach every other one "
        "(firewalls, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
    )


def _missing(meeting: Meeting) -> Finding:
    return Finding(
        "ranks",
        Verdict.FAILED,
        f"{of_ranks(meeting.missing)} of {meeting.size} did not arrive within "
        f"{meeting.timeout:g} s",
        "see whether the launcher has started them, what they say, and whether "
        f"{meeting.address} can be reached from there; --timeout waits longer",
    )


def examine_local(size: int) -> Report:
    """As ranks that take turns in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = [machine.describe(rank, "local", device) for rank in range(size)]
    report = Report("local", ranks, list(machine.judge(ranks)))
    # Local ranks notice by themselves that nobody can go on.
    found = local.run(lambda _: links.measure(transport_of(None, device), device), size)
    _look(report, lambda: found[0], device, lambda _: nullcontext())
    return report


def _look(
    report: Report,
    measured: Callable[[], list[MeasuredLink]],
    device: torch.device,
    begin: Callable[[str], AbstractContextManager[None]],
) -> None:
    """What takes all ranks together: links, then pipelines; ``begin`` is around each."""
    with begin("measuring links"):
        report.links = measured()
    report.findings += links.judge(report.links)
    for schedule in schedules.SCHEDULES:
        with begin(f"running {schedule}"):
            report.runs.append(schedules.try_schedule(schedule, len(report.ranks), device))
    report.findings += schedules.judge(report.runs)


def _device(backend: str) -> torch.device:
    if backend != "nccl" or not torch.cuda.is_available():
        return torch.device("cpu")
    # With too few GPUs some ranks share one, which is then told.
    number = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device
