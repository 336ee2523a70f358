"""The whole examination, in order; after what cannot be worked around, it ends early."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from taktline.checks import read
from taktline.cli.diagnosis import links, machine, schedules
from taktline.cli.diagnosis.meeting import Meeting, alarm
from taktline.cli.diagnosis.report import Finding, Report, Verdict, of_ranks
from taktline.transport import Transport, local, transport_of
from taktline.transport.control import share_texts

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
    phases = _Phases(meeting.rank, timeout)
    try:
        with phases.begin("making a process group"):
            group = meeting.group(chosen, device)
            transport = transport_of(group, device)
        _look(report, transport, device, group, phases)
        with phases.begin("parting"):
            dist.destroy_process_group()
    except Exception as error:
        report.findings.append(_broken(meeting.rank, phases.doing, error))
    return report, meeting.rank, meeting.part


class _Phases:
    """What is going on, and how long it may."""

    def __init__(self, rank: int, timeout: float | None) -> None:
        self._rank = rank
        self._timeout = timeout
        self.doing = ""

    def begin(self, doing: str) -> AbstractContextManager[None]:
        """Around each phase."""
        self.doing = doing
        # Local ranks notice by themselves that nobody can go on.
        return nullcontext() if self._timeout is None else alarm(self._rank, doing, self._timeout)


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
    """As local ranks, which take turns in this process."""
    return local.run(_examine_local_rank, size)[0]


def _examine_local_rank(rank: int) -> Report:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transport = transport_of(None, device)
    told = share_texts(transport, json.dumps(machine.describe(rank, "local", device)))
    ranks = [read(text, {str: object}, what="what a rank says of itself") for text in told]
    report = Report("local", ranks, list(machine.judge(ranks)))
    _look(report, transport, device, None, _Phases(rank, None))
    return report


def _look(
    report: Report,
    transport: Transport,
    device: torch.device,
    group: dist.ProcessGroup | None,
    phases: _Phases,
) -> None:
    """What takes all ranks together: links, then pipelines."""
    with phases.begin("measuring links"):
        report.links = links.measure(transport, device)
    report.findings += links.judge(report.links)
    for schedule in schedules.SCHEDULES:
        with phases.begin(f"running {schedule.__name__}"):
            report.runs.append(schedules.try_schedule(schedule, transport, device, group))
    report.findings += schedules.judge(report.runs)


def _device(backend: str) -> torch.device:
    if backend != "nccl" or not torch.cuda.is_available():
        return torch.device("cpu")
    # With too few GPUs some ranks share one, which is then told.
    number = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device
