"""The facts of each rank (versions, device, threads), and whether they fit together."""

from __future__ import annotations

import os
import platform
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy
import torch
import torch.distributed as dist

from taktline import __version__
from taktline.cli.doctor.report import Finding, Verdict, of_ranks
from taktline.device import gpu_for_each_process
from taktline.text import counted

Ranks = Sequence[dict[str, Any]]

VERSIONS = {
    "python": ("Python", Verdict.WARNING),
    "torch": ("torch", Verdict.FAILED),
    "numpy": ("NumPy", Verdict.WARNING),
    "taktline": ("taktline", Verdict.FAILED),
}
"""Each with its name, and how bad it is if the ranks differ in it."""


def wanted_backend(asked: str | None) -> str:
    """nccl if every rank of this machine can have a GPU of its own, else gloo."""
    if asked is not None:
        return asked
    return "nccl" if gpu_for_each_process() and dist.is_nccl_available() else "gloo"


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


def judge(ranks: Ranks) -> Iterator[Finding]:
    """Whether the facts of all ranks fit together."""
    for key, (name, severity) in VERSIONS.items():
        groups = _grouped(ranks, lambda facts, key=key: facts[key])
        if len(groups) == 1:
            yield Finding(name, Verdict.OK, f"{next(iter(groups))} on every rank")
        else:
            yield Finding(name, severity, _listed(groups), "install the same version everywhere")
    yield from _judge_devices(ranks)
    yield from _judge_threads(ranks)
    yield from _judge_addresses(ranks)


def _grouped(ranks: Ranks, key: Callable[[dict[str, Any]], Any]) -> dict[Any, list[int]]:
    """The ranks that have each value."""
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for rank, facts in enumerate(ranks):
        groups[key(facts)].append(rank)
    return dict(groups)


def _listed(groups: dict[Any, list[int]]) -> str:
    return "; ".join(f"{value} on {of_ranks(who)}" for value, who in groups.items())


def _judge_devices(ranks: Ranks) -> Iterator[Finding]:
    backends = _grouped(ranks, lambda facts: facts["backend"])
    if len(backends) > 1:
        text = f"the ranks disagree: {_listed(backends)}"
        yield Finding("backend", Verdict.FAILED, text, "choose one with --backend")
        return
    (backend,) = backends
    if backend == "nccl":
        yield from _judge_gpus(ranks)
    elif backend == "gloo" and any(facts["gpus"] for facts in ranks):
        yield Finding(
            "backend",
            Verdict.WARNING,
            "gloo: GPUs are there, but only the CPUs were checked",
            "start as many ranks on a machine as it has GPUs (--backend nccl if you start them "
            "here); several ranks on one GPU run with --local",
        )
    else:
        kinds = _grouped(ranks, lambda facts: facts["gpu"] or "CPU")
        yield Finding("backend", Verdict.OK, f"{backend}, on {', '.join(kinds)}")


def _judge_gpus(ranks: Ranks) -> Iterator[Finding]:
    without = [rank for rank, facts in enumerate(ranks) if facts["gpu"] is None]
    if without:
        yield Finding(
            "GPUs",
            Verdict.FAILED,
            f"nccl needs GPUs, and torch finds none on {of_ranks(without)}",
            "install a torch with CUDA there and see nvidia-smi, or use --backend gloo",
        )
        return
    shared = {
        gpu: who
        for gpu, who in _grouped(ranks, lambda f: (f["host"], f["gpu_id"])).items()
        if len(who) > 1
    }
    if shared:
        told = "; ".join(f"{of_ranks(who)} share one on {gpu[0]}" for gpu, who in shared.items())
        yield Finding("GPUs", Verdict.FAILED, told, "use one GPU per rank; nccl cannot share them")
    kinds = _grouped(ranks, lambda facts: facts["gpu"])
    if len(kinds) > 1:
        advice = "cut the model so that slower ranks get less of it"
        yield Finding("GPUs", Verdict.WARNING, _listed(kinds), advice)
    elif not shared:
        yield Finding("backend", Verdict.OK, f"nccl, on {next(iter(kinds))}")
    few = [rank for rank, facts in enumerate(ranks) if facts["connections"] == "1"]
    if few:
        yield Finding(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            Verdict.WARNING,
            f"is 1 on {of_ranks(few)}: the kernels of several channels wait for each other",
            "leave it unset, or above 1",
        )
    else:
        yield Finding("CUDA_DEVICE_MAX_CONNECTIONS", Verdict.OK, "unset or above 1")


def _judge_threads(ranks: Ranks) -> Iterator[Finding]:
    if ranks[0]["backend"] == "local":
        yield Finding("threads", Verdict.OK, "local ranks take turns, so each can use all cores")
        return
    crowded = False
    for host, who in _grouped(ranks, lambda facts: facts["host"]).items():
        cores = max(ranks[rank]["cores"] for rank in who)
        threads = sum(ranks[rank]["threads"] for rank in who)
        if threads > cores:
            crowded = True
            used = f"{counted(threads, 'thread')} on {counted(cores, 'core')}"
            advice = f"set OMP_NUM_THREADS={max(1, cores // len(who))}"
            if threads == len(who):
                advice = "start fewer ranks here"
            text = f"{host}: {of_ranks(who)} use {used}"
            yield Finding("threads", Verdict.WARNING, text, advice)
    if not crowded:
        yield Finding("threads", Verdict.OK, "no more of them than there are cores")


def _judge_addresses(ranks: Ranks) -> Iterator[Finding]:
    """Whether hosts know themselves by an address that others can reach."""
    if len(_grouped(ranks, lambda facts: facts["host"])) == 1:
        return
    hidden = [
        rank
        for rank, facts in enumerate(ranks)
        if not facts["interface"] and (facts["address"] or "127.").startswith("127.")
    ]
    if hidden:
        yield Finding(
            "addresses",
            Verdict.WARNING,
            f"the host name of {of_ranks(hidden)} resolves to an address that others cannot reach",
            "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network interface, such as "
            "eth0, or correct /etc/hosts",
        )
    else:
        yield Finding("addresses", Verdict.OK, "every host name resolves to a reachable one")
