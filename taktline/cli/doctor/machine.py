"""The facts of each rank (versions, device, threads), and whether they fit together."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import numpy
import torch
import torch.distributed as dist

from taktline import __version__
from taktline.cli.doctor.report import Finding, Verdict, of_ranks
from taktline.device import gpu_for_each_process
from taktline.text import counted

_Ranks = Sequence[dict[str, Any]]

_VERSIONS: dict[str, tuple[str, Verdict]] = {
    "python": ("Python", "warning"),
    "torch": ("torch", "failed"),
    "numpy": ("NumPy", "warning"),
    "taktline": ("taktline", "failed"),
}
"""Each with its name, and how bad it is if the ranks differ in it."""


def choose(asked: str | None) -> tuple[str, torch.device]:
    """The backend, nccl if every rank here can have a GPU of its own, and this rank's device."""
    best = "nccl" if gpu_for_each_process() and dist.is_nccl_available() else "gloo"
    backend = asked or best
    if backend != "nccl" or not torch.cuda.is_available():
        return backend, torch.device("cpu")
    # With too few GPUs some ranks share one, which a check reports.
    number = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return backend, device


def describe(rank: int, backend: str, device: torch.device) -> dict[str, Any]:
    """The facts of a rank."""
    on_gpu, address, cores = device.type == "cuda", None, os.cpu_count()
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    if hasattr(os, "sched_getaffinity"):  # in a container, these may be fewer
        cores = len(os.sched_getaffinity(0))
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "address": address,
        "backend": backend,
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "gpu_id": str(torch.cuda.get_device_properties(device).uuid) if on_gpu else None,
        "gpus": torch.cuda.device_count(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "taktline": __version__,
    }


def judge(ranks: _Ranks) -> Iterator[Finding]:
    """Whether the facts of all ranks fit together."""
    for key, (name, severity) in _VERSIONS.items():
        groups = _grouped(ranks, key)
        if len(groups) == 1:
            yield Finding(name, "ok", f"{next(iter(groups))} on every rank")
        else:
            yield Finding(name, severity, _listed(groups), "install the same version everywhere")
    yield from _judge_devices(ranks)
    yield from _judge_threads(ranks)
    yield from _judge_addresses(ranks)


def _grouped(ranks: _Ranks, *keys: str) -> dict[Any, list[int]]:
    """The ranks that have each value; of several keys, the values together."""
    groups: dict[Any, list[int]] = {}
    for rank, facts in enumerate(ranks):
        groups.setdefault(itemgetter(*keys)(facts), []).append(rank)
    return groups


def _listed(groups: dict[Any, list[int]]) -> str:
    return "; ".join(f"{value} on {of_ranks(who)}" for value, who in groups.items())


def _judge_devices(ranks: _Ranks) -> Iterator[Finding]:
    backends = _grouped(ranks, "backend")
    if len(backends) > 1:
        text = f"the ranks disagree: {_listed(backends)}"
        yield Finding("backend", "failed", text, "choose one with --backend")
        return
    (backend,) = backends
    if backend == "nccl":
        yield from _judge_gpus(ranks)
    elif backend == "gloo" and any(facts["gpus"] for facts in ranks):
        yield Finding(
            "backend",
            "warning",
            "gloo: GPUs are there, but only the CPUs were checked",
            "start as many ranks on a machine as it has GPUs (--backend nccl if you start them "
            "here); several ranks on one GPU run with --local",
        )
    else:
        kinds = dict.fromkeys(facts["gpu"] or "CPU" for facts in ranks)
        yield Finding("backend", "ok", f"{backend}, on {', '.join(kinds)}")


def _judge_gpus(ranks: _Ranks) -> Iterator[Finding]:
    without = [rank for rank, facts in enumerate(ranks) if facts["gpu"] is None]
    if without:
        yield Finding(
            "GPUs",
            "failed",
            f"nccl needs GPUs, and torch finds none on {of_ranks(without)}",
            "install a torch with CUDA there and see nvidia-smi, or use --backend gloo",
        )
        return
    shared = [
        f"{of_ranks(who)} share one on {host}"
        for (host, _), who in _grouped(ranks, "host", "gpu_id").items()
        if len(who) > 1
    ]
    if shared:
        advice = "use one GPU per rank; nccl cannot share them"
        yield Finding("GPUs", "failed", "; ".join(shared), advice)
    kinds = _grouped(ranks, "gpu")
    if len(kinds) > 1:
        advice = "cut the model so that slower ranks get less of it"
        yield Finding("GPUs", "warning", _listed(kinds), advice)
    elif not shared:
        yield Finding("backend", "ok", f"nccl, on {next(iter(kinds))}")
    few = [rank for rank, facts in enumerate(ranks) if facts["connections"] == "1"]
    if few:
        yield Finding(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "warning",
            f"is 1 on {of_ranks(few)}: the kernels of several channels wait for each other",
            "leave it unset, or above 1",
        )
    else:
        yield Finding("CUDA_DEVICE_MAX_CONNECTIONS", "ok", "unset or above 1")


def _judge_threads(ranks: _Ranks) -> Iterator[Finding]:
    if ranks[0]["backend"] == "local":
        yield Finding("threads", "ok", "local ranks take turns, so each can use all cores")
        return
    crowded: list[Finding] = []
    for host, who in _grouped(ranks, "host").items():
        cores = max(ranks[rank]["cores"] for rank in who)
        threads = sum(ranks[rank]["threads"] for rank in who)
        if threads > cores:
            used = f"{counted(threads, 'thread')} on {counted(cores, 'core')}"
            text = f"{host}: {of_ranks(who)} use {used}"
            advice = f"set OMP_NUM_THREADS={max(1, cores // len(who))}"
            if threads == len(who):
                advice = "start fewer ranks here"
            crowded.append(Finding("threads", "warning", text, advice))
    yield from crowded or [Finding("threads", "ok", "no more of them than there are cores")]


def _judge_addresses(ranks: _Ranks) -> Iterator[Finding]:
    """Whether hosts know themselves by an address that others can reach."""
    if len(_grouped(ranks, "host")) == 1:
        return
    hidden = [
        rank
        for rank, facts in enumerate(ranks)
        if not facts["interface"] and (facts["address"] or "127.").startswith("127.")
    ]
    if hidden:
        yield Finding(
            "addresses",
            "warning",
            f"the host name of {of_ranks(hidden)} resolves to an address that others cannot reach",
            "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network interface, such as "
            "eth0, or correct /etc/hosts",
        )
    else:
        yield Finding("addresses", "ok", "every host name resolves to a reachable one")
