"""Saving and loading, against ``torch.distributed.checkpoint``, in one run on the same disk.

Two ranks with AdamW. Rounds alternate, and medians are compared. A save is done when it is on the
disk: both see to that. ``async_save`` shows how long training is blocked: until the call has
copied everything, and returned on every rank. Forward and backward after it (of ``--rows`` rows)
share the cores with the writing, and take longer.
Memory is what a rank holds at the most beside its model and optimizer, in parts of these.

python benchmarks/checkpoint.py --width 2048 --rounds 5
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from _peers import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import taktline as tl
from taktline.checkpoint.saving import wait

dcp: Any = importlib.import_module("torch.distributed.checkpoint")
RANKS = 2


def make(width: int, layers: int) -> tuple[Any, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    pipe: Any = tl.Pipeline(
        model, cuts=[str(layers // 2)], microbatches=2, loss_fn=nn.functional.mse_loss
    )
    optimizer = torch.optim.AdamW(pipe.parameters())
    return pipe, optimizer


def timed(do: Callable[[], object]) -> tuple[float, int]:
    """The seconds until the last rank is done, and the bytes that memory rises by on this one."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before, started = peak(), time.perf_counter()
    do()
    seconds = torch.tensor(time.perf_counter() - started)
    risen = peak() - before
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item(), risen


def peak() -> int:
    """The most bytes of memory that this process has had."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def measure(rank: int, _: int, options: argparse.Namespace, folder: str) -> None:
    warnings.simplefilter("ignore")
    pipe, optimizer = make(options.width, options.layers)
    x = torch.ones(options.rows, options.width)

    def step() -> None:
        pipe.step(x, target=x)
        optimizer.zero_grad()

    pipe.step(x, target=x)
    optimizer.step()
    ours, theirs, beside = Path(folder, "ours"), Path(folder, "dcp"), Path(folder, "beside")
    times: dict[str, list[tuple[float, int]]] = {}

    def dcp_state() -> dict[str, Any]:
        return dict(zip(("model", "optim"), get_state_dict(pipe, optimizer), strict=True))

    def dcp_load() -> None:
        state = dcp_state()
        dcp.load(state, checkpoint_id=theirs)
        set_state_dict(
            pipe,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )

    verbs: dict[str, Callable[[], object]] = {
        "save": lambda: pipe.save(ours, optimizer),
        "load": lambda: pipe.load(ours, optimizer),  # each after its own save: a disk goes on
        "dcp.save": lambda: dcp.save(dcp_state(), checkpoint_id=theirs),
        "dcp.load": dcp_load,
        "step": step,
        "async_save": lambda: pipe.save(beside, optimizer, async_save=True),
        "step beside": step,
    }
    for _ in range(options.rounds + 1):
        for name, do in verbs.items():
            room = {"save": ours, "dcp.save": theirs, "async_save": beside}.get(name)
            if room is not None and rank == 0:
                shutil.rmtree(room, ignore_errors=True)  # what is removed is not measured
            times.setdefault(name, []).append(timed(do))
        wait(beside, rank)
    if rank == 0:
        size = sum(file.stat().st_size for file in ours.rglob("*.safetensors"))
        show({name: found[1:] for name, found in times.items()}, size)
    dist.barrier()


def show(found: dict[str, list[tuple[float, int]]], size: int) -> None:
    times = {name: median(seconds for seconds, _ in each) for name, each in found.items()}
    held = {name: max(risen for _, risen in each) / size * RANKS for name, each in found.items()}
    print(f"{size / 1e6:.0f} MB on {RANKS} ranks")
    for name in ("save", "load"):
        mine, other = times[name], times[f"dcp.{name}"]
        print(
            f"{name}: {size / mine / 1e6:,.0f} MB/s; dcp.{name}: {size / other / 1e6:,.0f} MB/s; "
            f"{mine / other:.2f} of its time; "
            f"memory: {held[name]:.2f}, dcp: {held[f'dcp.{name}']:.2f}"
        )
    call = times["async_save"]
    print(
        f"async_save: training is blocked for {call / times['save']:.1%} of a save's time, "
        f"{size / call / 1e6:,.0f} MB/s"
    )
    alone, beside = times["step"], times["step beside"]
    print(
        f"forward and backward beside it: {beside * 1e3:.0f} ms, {alone * 1e3:.0f} ms alone; "
        f"a save: {times['save'] * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64, help="of a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to measure")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with TemporaryDirectory(dir=given.folder) as room:
        run_ranks(measure, RANKS, given, room)
