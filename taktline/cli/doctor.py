"""What ``taktline doctor`` examines: versions, devices, links, and a step of a tiny pipeline."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import combinations
from statistics import median
from typing import Any

import numpy
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from taktline import __version__
from taktline.checks import loads
from taktline.device import gpu_for_each_process, keep_generators
from taktline.errors import TaktlineError, TransportError
from taktline.text import by_rank, counted
from taktline.train import Pipeline
from taktline.transport import Channel, Transport, transport_of
from taktline.transport.exit_hooks import meet

_GRACE = 2.0
"""Seconds in which rank 0 prints what has failed."""
_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "bold red")}
_SCHEDULE = "zbv"
_LARGE = 4 << 20
"""Bytes of a large message."""


@dataclass(slots=True)
class Report:
    """What was found; the same on every rank, unless a connection broke."""

    backend: str
    ranks: list[dict[str, Any]]
    links: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, str]] = field(default_factory=list)

    def add(self, check: str, verdict: str, text: str, advice: str = "") -> None:
        """Add the result of a check: ok, warning or failed, and what to do about it."""
        self.findings.append({"check": check, "verdict": verdict, "text": text, "advice": advice})

    def count(self, verdict: str) -> int:
        """How many checks have a verdict."""
        return sum(found["verdict"] == verdict for found in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"well": not self.count("failed"), **asdict(self)}

    def show(self) -> None:
        """Print the ranks, their links and the findings."""
        console = Console(highlight=False, markup=False)
        for facts in self.ranks:
            console.print(f"  rank {facts['rank']}: {facts['host']}, {facts['device']}")
        for link in self.links:
            rate = f"{1e6 * link['latency']:.1f} µs, {1e-9 * link['bandwidth']:.2f} GB/s"
            console.print(f"  ranks {link['ranks'][0]} ↔ {link['ranks'][1]}: {rate}")
        for found in self.findings:
            mark, colour = _MARKS[found["verdict"]]
            console.print(f"{mark} {found['check']}: {found['text']}", style=colour)
            if found["advice"]:
                console.print(f"  → {found['advice']}")
        failed, warnings = self.count("failed"), self.count("warning")
        well = f"Everything works, with {counted(warnings, 'warning')}." if warnings else ""
        console.print(f"{counted(failed, 'check')} failed." if failed else well or "All is well.")


def examine(backend: str | None, timeout: float) -> Report:
    """Examine as a rank that a launcher has started; raises if the ranks do not meet."""
    best = "nccl" if gpu_for_each_process() and dist.is_nccl_available() else "gloo"
    backend, device = backend or best, torch.device("cpu")
    if backend == "nccl" and torch.cuda.is_available():
        # With too few GPUs some ranks share one, which a check reports.
        number = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout)
    try:
        store, rank, size = meet(limit)
    except RuntimeError as error:
        raise TransportError(
            f"rank {os.environ['RANK']} does not find the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} within {timeout:g} s; see whether all of them run and "
            f"can reach it ({str(error).splitlines()[0]})"
        ) from None

    def share(what: str, value: Any) -> list[Any]:
        store.set(f"{what} {rank}", json.dumps(value))
        keys = [f"{what} {each}" for each in range(size)]
        return [loads(store.get(key), what=f"the {key}") for key in keys]

    report, doing = Report(backend, []), "comparing ranks"
    try:
        report.ranks = share("facts", describe(rank, backend, device))
        if check_devices(report):
            doing = "making a process group"
            group, gpu = PrefixStore("group", store), device if device.type == "cuda" else None
            dist.init_process_group(
                backend, store=group, rank=rank, world_size=size, timeout=limit, device_id=gpu
            )
            doing = "measuring links"
            check_links(report, share("links", measure(transport_of(None, device), device)))
            doing = "running a pipeline"
            check_pipeline(report, device)
            dist.destroy_process_group()
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        text = f"broke on rank {rank} while {doing}: {reason}"
        advice = "see what the other ranks say, and whether every host can reach every other "
        advice += "one (firewalls, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
        report.add("connection", "failed", text, advice)
    if rank and report.count("failed"):
        time.sleep(_GRACE)  # launchers end all ranks with the first, and rank 0 has to print
    return report


def describe(rank: int, backend: str, device: torch.device) -> dict[str, Any]:
    """The facts of a rank."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "backend": backend,
        "device": f"{device} {gpu.name}" if gpu else str(device),
        "gpu": gpu.name if gpu else None,
        "gpu_id": str(gpu.uuid) if gpu else None,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "NumPy": numpy.__version__,
        "taktline": __version__,
    }


def check_devices(report: Report) -> bool:
    """Whether versions and devices fit together; returns whether there can be a process group."""
    facts: dict[str, list[Any]] = {key: [of[key] for of in report.ranks] for key in report.ranks[0]}
    for name in ("Python", "NumPy", "torch", "taktline"):
        bad = "failed" if name in ("torch", "taktline") else "warning"
        same = len(set(facts[name])) == 1
        advice = "" if same else "install the same version everywhere"
        report.add(name, "ok" if same else bad, by_rank(facts[name]), advice)
    gpus, ids = facts["gpu"], facts["gpu_id"]
    if len(set(facts["backend"])) > 1:
        found = "failed", by_rank(facts["backend"]), "choose one with --backend on every rank"
    elif report.backend == "nccl" and (None in ids or len(set(ids)) < len(ids)):
        where = [f"{of['host']}: {of['device']}" for of in report.ranks]
        advice = "see nvidia-smi, and whether this torch has CUDA; or use --backend gloo"
        found = "failed", f"nccl needs a GPU for each rank, but there is {by_rank(where)}", advice
    elif len(set(gpus)) > 1:
        found = "warning", by_rank(gpus), "cut the model so that slower ranks get less of it"
    else:
        found = "ok", f"{report.backend}, on {gpus[0] or 'CPU'}"
    report.add("devices", *found)
    return found[0] != "failed"


def measure(transport: Transport, device: torch.device) -> list[dict[str, Any]]:
    """The links of this rank to higher ones: of all pairs up to 8 ranks, beyond of neighbours.

    Seconds for a small message, and bytes a second for large ones, over the channels of a pipeline.
    """
    pairs = combinations(range(transport.size), 2)
    chosen = [(a, b) for a, b in pairs if transport.size <= 8 or b == a + 1]
    channels = [(Channel(a, b, False), Channel(b, a, False)) for a, b in chosen]
    transport.open([channel for both in channels for channel in both])
    links: list[dict[str, Any]] = []
    for there, back in channels:
        transport.exchange([0], "measuring links")  # one at a time: they may share a cable
        if transport.rank in there[:2]:
            latency = _one_way(transport, there, back, torch.zeros(16, device=device), 25)
            large = torch.zeros(_LARGE, dtype=torch.uint8, device=device)
            rate = _LARGE / max(_one_way(transport, there, back, large, 3) - latency, 1e-9)
            link = {"ranks": there[:2], "latency": latency, "bandwidth": rate}
            links += [link] * (transport.rank == there.sender)
    return links


def _one_way(
    transport: Transport, there: Channel, back: Channel, message: torch.Tensor, times: int
) -> float:
    """Half the seconds of a round trip, in the median."""
    took: list[float] = []
    for _ in range(1 + times):
        begin = time.perf_counter()
        ways = (transport.sender(there), transport.receiver(back))
        if transport.rank == there.receiver:
            ways = (transport.receiver(there), transport.sender(back))
        for way in ways:
            way(message).wait()
        message[:1].item()  # waits for a GPU
        took.append(time.perf_counter() - begin)
    return median(took[1:]) / 2  # the first one connects, and warms up


def check_links(report: Report, measured: Sequence[list[dict[str, Any]]]) -> None:
    """Whether a link is much slower than the others."""
    report.links = [link for of_rank in measured for link in of_rank]
    typical = median([link["bandwidth"] for link in report.links] or [0.0])
    slow = [link["ranks"] for link in report.links if link["bandwidth"] < typical / 4]
    if slow:
        told = ", ".join(f"{a} ↔ {b}" for a, b in slow)
        advice = "place neighbouring stages on ranks with fast links"
        report.add("links", "warning", f"less than a quarter of the usual rate: {told}", advice)
    else:
        report.add("links", "ok", f"{counted(len(report.links), 'link')}, both ways")


def check_pipeline(report: Report, device: torch.device) -> None:
    """Compare a step of a tiny pipeline with the plain model."""
    ranks = len(report.ranks)
    with keep_generators([device]):  # the same on every rank
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2 * ranks)]
        x, target = torch.randn(2, 8 * ranks, 32).to(device)
    options: dict[str, Any] = {"schedule": _SCHEDULE, "microbatches": 2 * ranks, "ranks": ranks}
    try:
        # Cut by hand, which is quick.
        with Pipeline(layers, loss_fn=nn.functional.mse_loss, device=device, **options) as pipe:
            found = pipe.verify(nn.Sequential(*layers), x, target=target)
    except TaktlineError as error:  # every rank raises the same
        report.add("pipeline", "failed", f"{_SCHEDULE}: {error}", "see the error")
        return
    if found:
        report.add("pipeline", "ok", f"a step of {_SCHEDULE} has the plain model's gradients")
    else:
        text = f"{_SCHEDULE} differs from the plain model: {found}"
        report.add("pipeline", "failed", text, "run one torch everywhere; look for broken memory")
