"""What ``taktline doctor`` examines: versions, devices, links, and a step of a tiny pipeline."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
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
from torch.distributed.rendezvous import rendezvous

from taktline import __version__
from taktline.checks import loads
from taktline.device import gpu_for_each_process, keep_generators
from taktline.errors import TaktlineError, TransportError
from taktline.text import by_rank, counted
from taktline.train import Pipeline
from taktline.transport import Channel, Transport, local, transport_of

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


class Meeting:
    """The store where ranks meet before there is a process group, so that it can name who lacks."""

    def __init__(self, timeout: float) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self.timeout, self.doing = timedelta(seconds=timeout), "looking for the other ranks"
        try:
            # As if alone, because rank 0 would wait here for others that it could not name.
            store, _, _ = next(rendezvous("env://", world_size=1, timeout=self.timeout))
        except (RuntimeError, ValueError) as error:
            raise TransportError(
                f"rank {self.rank} cannot reach {self.address} within {timeout:g} s; see whether "
                f"rank 0 runs there and the port is open ({str(error).splitlines()[0]})"
            ) from None
        # torchrun may keep one store for all attempts.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"taktline doctor {attempt}", store)

    def share(self, what: str, value: Any) -> list[Any]:
        """Share a value; returns those of all ranks that have come in time."""
        keys = [f"{what} {rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(value))
        with suppress(dist.DistStoreError):  # one is missing
            self.store.wait(keys, self.timeout)
        there = [key for key in keys if self.store.check([key])]
        return [loads(self.store.get(key), what=f"the {key}") for key in there]


def examine(backend: str | None, meeting: Meeting) -> Report:
    """Examine as a rank that a launcher has started."""
    best = "nccl" if gpu_for_each_process() and dist.is_nccl_available() else "gloo"
    backend, device = backend or best, torch.device("cpu")
    if backend == "nccl" and torch.cuda.is_available():
        # With too few GPUs some ranks share one, which a check reports.
        number = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    report = Report(backend, [])
    try:
        report.ranks = meeting.share("facts", describe(meeting.rank, backend, device))
        missing = set(range(meeting.size)) - {facts["rank"] for facts in report.ranks}
        if missing:
            limit = meeting.timeout.total_seconds()
            text = f"{_of(missing)} of {meeting.size} did not arrive within {limit:g} s"
            advice = "see whether the launcher has started them, what they say, and whether "
            advice += f"{meeting.address} can be reached from there; --timeout waits longer"
            report.add("ranks", "failed", text, advice)
        elif check_devices(report):
            meeting.doing = "making a process group"
            dist.init_process_group(
                backend,
                rank=meeting.rank,
                world_size=meeting.size,
                store=PrefixStore("group", meeting.store),
                timeout=meeting.timeout,
                device_id=device if device.type == "cuda" else None,
            )
            meeting.doing = "measuring links"
            found = measure(transport_of(None, device), device)
            check_links(report, meeting.share("links", found))
            meeting.doing = "running a pipeline"
            check_pipeline(report, device)
            dist.destroy_process_group()
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        text = f"broke on rank {meeting.rank} while {meeting.doing}: {reason}"
        advice = "see what the other ranks say, and whether every host can reach every other "
        advice += "one (firewalls, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
        report.add("connection", "failed", text, advice)
    if meeting.rank and report.count("failed"):
        time.sleep(_GRACE)  # launchers end all ranks with the first, and rank 0 has to print
    return report


def examine_local(size: int) -> Report:
    """Examine local ranks, which take turns in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = Report("local", [describe(rank, "local", device) for rank in range(size)])
    check_devices(report)
    measured = local.run(lambda _: measure(transport_of(None, device), device), size)
    check_links(report, measured)
    check_pipeline(report, device)
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
    gpus, ids, nccl = facts["gpu"], facts["gpu_id"], report.backend == "nccl"
    without = {rank for rank, gpu in enumerate(gpus) if gpu is None}
    shared = {rank for rank, gpu in enumerate(ids) if ids.count(gpu) > 1}
    if len(set(facts["backend"])) > 1:
        found = "failed", by_rank(facts["backend"]), "choose one with --backend on every rank"
    elif nccl and without:
        advice = "install a torch with CUDA there and see nvidia-smi, or use --backend gloo"
        found = "failed", f"nccl needs GPUs, and torch finds none on {_of(without)}", advice
    elif nccl and shared:
        found = "failed", f"{_of(shared)} share GPUs, which nccl cannot", "use one GPU per rank"
    elif len(set(gpus)) > 1:
        found = "warning", by_rank(gpus), "cut the model so that slower ranks get less of it"
    else:
        found = "ok", f"{report.backend}, on {gpus[0] or 'CPU'}"
    report.add("devices", *found)
    return found[0] != "failed"


def _of(ranks: set[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


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
            # The first message of each size connects, and warms up.
            small = [_round_trip(transport, there, back, 16, device) for _ in range(26)][1:]
            large = [_round_trip(transport, there, back, _LARGE, device) for _ in range(4)][1:]
            latency, long = (median(took for took, _ in trips) / 2 for trips in (small, large))
            intact = all(good for _, good in small + large)
            rate = _LARGE / max(long - latency, 1e-9)
            link = {"ranks": there[:2], "latency": latency, "bandwidth": rate, "intact": intact}
            links += [link] * (transport.rank == there.sender)
    return links


def _round_trip(
    transport: Transport, there: Channel, back: Channel, size: int, device: torch.device
) -> tuple[float, bool]:
    """How long a message takes there and back, and whether it comes back unchanged."""
    message = torch.full((size,), 7, dtype=torch.uint8, device=device)
    echo = torch.zeros_like(message)
    begin = time.perf_counter()
    if transport.rank == there.receiver:
        transport.receiver(there)(echo).wait()
        transport.sender(back)(echo).wait()
        return 0.0, True
    transport.sender(there)(message).wait()
    transport.receiver(back)(echo).wait()
    intact = bool((echo[:: size // 8] == 7).all())  # which waits for a GPU
    return time.perf_counter() - begin, intact


def check_links(report: Report, measured: Sequence[list[dict[str, Any]]]) -> None:
    """Whether every message arrived unchanged, and whether a link is slower than the others."""
    report.links = [link for of_rank in measured for link in of_rank]
    typical = median([link["bandwidth"] for link in report.links] or [0.0])
    broken = [link["ranks"] for link in report.links if not link["intact"]]
    slow = [link["ranks"] for link in report.links if link["bandwidth"] < typical / 4]
    told = ", ".join(f"{a} ↔ {b}" for a, b in broken or slow)
    if broken:
        advice = "check the network, and that every rank runs the same torch"
        report.add("links", "failed", f"what arrived is not what was sent: {told}", advice)
    elif slow:
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
