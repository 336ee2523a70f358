"""The whole examination, in order; after what cannot be worked around, it ends early."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from taktline.cli.diagnosis import links, machine, schedules
from taktline.cli.diagnosis.meeting import Meeting, alarm
from taktline.cli.diagnosis.report import Finding, Report, Verdict, of_ranks
from taktline.transport import Transport, find, local
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
    try:
        with alarm(meeting.rank, "making a process group", timeout):
            group = meeting.group(chosen, device)
            transport = find(group, device)
        _look(report, transport, device, group, timeout)
        with alarm(meeting.rank, "parting", timeout):
            dist.destroy_process_group()
    except Exception as error:
        report.findings.append(
            Finding(
                "links",
                Verdict.FAILED,
                f"rank {meeting.rank}: {type(error).__name__}: {error}",
                "see that every host can reach every other one (GLOO_SOCKET_IFNAME, "
                "NCCL_SOCKET_IFNAME, firewalls)",
            )
        )
    return report, meeting.rank, meeting.part


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
    transport = find(None, device)
    told = share_texts(transport, json.dumps(machine.describe(rank, "local", device)))
    ranks = [json.loads(text) for text in told]
    report = Report("local", ranks, list(machine.judge(ranks)))
    _look(report, transport, device, None, None)
    return report


def _look(
    report: Report,
    transport: Transport,
    device: torch.device,
    group: dist.ProcessGroup | None,
    timeout: float | None,
) -> None:
    """What takes all ranks together: links, then pipelines."""
    # Local ranks notice by themselves that nobody can go on.
    patience = timeout if timeout is not None else 3600.0
    with alarm(transport.rank, "measuring links", patience):
        report.links = links.measure(transport, device)
    report.findings += links.judge(report.links)
    for schedule in schedules.SCHEDULES:
        with alarm(transport.rank, f"running {schedule.__name__}", patience):
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
