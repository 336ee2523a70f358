"""Offload and recompute as part of the plan, on one GPU: memory, time, and the same gradients.

    python benchmarks/offload.py            4 local ranks, then 2 nccl ranks that share the GPU
    python benchmarks/offload.py --tiny     the same script on the CPU, as without a GPU

A GPT with long sequences in interleaved 1F1B. First the bandwidth of a rank to and from the host is
measured, alone and with both directions at once, and how long each stage computes. From these the
plans are made, which offload, or recompute, so much that the ranks have half or 30% of their
activations at most; beside them runs ``torch.utils.checkpoint`` around all blocks. The peak is what
the allocator had at most in a step, less what it had before (weights, gradients). All take turns;
times are medians. Peaks and gradients are those of traced steps, which follow the plan also on
local ranks. Gradients are compared with those of the plan that saves nothing, which comes first
twice: where even these differ, kernels of the device add up in another order each time.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline.errors import ScheduleError
from taktline.plan import Costs, Kind, Plan, build, fit_memory, peak_memory, simulate
from taktline.stage.offload import copies_on


@dataclass(frozen=True)
class Size:
    """What is trained."""

    width: int
    length: int
    blocks: int
    microbatches: int
    rounds: int


SIZES = {"local": Size(512, 131072, 8, 4, 3), "nccl": Size(512, 131072, 8, 4, 3)}
TINY = Size(64, 64, 8, 8, 2)
WORDS = 1024


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self, width: int, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.heads, self.checkpoints = max(1, width // 128), checkpoints
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpoints else self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def stages_of(size: Size, count: int, device: torch.device) -> list[nn.Module]:
    """The model in so many stages."""
    torch.manual_seed(0)
    each = size.blocks // count
    made: list[list[nn.Module]] = [[Block(size.width) for _ in range(each)] for _ in range(count)]
    made[0].insert(0, nn.Embedding(WORDS, size.width))
    made[-1] += [nn.LayerNorm(size.width), nn.Linear(size.width, WORDS)]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [nn.Sequential(*part).to(device, dtype) for part in made]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def bandwidth(device: torch.device, nbytes: int) -> tuple[float, float]:
    """Bytes per second to and from the host: with one direction at a time, and with both."""
    copies = copies_on(device)
    here = torch.empty(2, nbytes, dtype=torch.uint8, device=device)
    hosts = [copies.take(nbytes), copies.take(nbytes)]
    calls: list[Callable[[], object]] = [
        lambda: copies.wait(copies.copy([(hosts[0], here[0])], inward=False)),
        lambda: [
            copies.wait(end)
            for end in [
                copies.copy([(hosts[0], here[0])], inward=False),
                copies.copy([(here[1], hosts[1])], inward=True),
            ]
        ],
    ]
    found = [nbytes / statistics.median(timed(call, device) for _ in range(5)) for call in calls]
    copies.give(hosts)
    return found[0], found[1]


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, and of what it has told a GPU."""
    settle(device)
    began = time.perf_counter()
    call()
    settle(device)
    return time.perf_counter() - began


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Run:
    """One way to train, and what was measured of it."""

    name: str
    pipe: tl.Pipeline
    checkpoints: bool
    times: list[float]
    peak: float = 0.0
    exact: bool = True

    def step(self, words: Tensor) -> None:
        """A step from gradients of zero; all ways train the same modules."""
        for module in self.pipe.modules():
            if isinstance(module, Block):
                module.checkpoints = self.checkpoints
        for p in self.pipe.parameters():
            if p.grad is not None:
                p.grad.zero_()
        self.pipe.step(words, target=words)


def peak_of(call: Callable[[], object], device: torch.device) -> float:
    """The bytes that a call has at most beside what was there; 0 on the CPU: nobody counts."""
    gc.collect()
    settle(device)
    if device.type != "cuda":
        call()
        return 0.0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    settle(device)
    return float(torch.cuda.max_memory_allocated(device) - before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Without attention's quicker backward, whose sums differ from run to run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def limits_of(plan: Plan, costs: Costs, share: float) -> list[float]:
    """For each rank: together a share of all peaks, and never less than two activations."""
    peaks, least = peak_memory(plan, costs), 2.1 * costs.of("activation", plan.stages).max()
    scale = share
    while scale > 0.01 and np.maximum(scale * peaks, least).sum() > share * peaks.sum():
        scale *= 0.98
    return np.maximum(scale * peaks, least).tolist()


def compare(size: Size, ranks: int, device: torch.device, *, local: bool) -> None:
    """Plans that save memory beside the one that does not."""
    words = torch.randint(WORDS, (size.microbatches, size.length), device=device)
    plan = build(
        "interleaved_1f1b",
        ranks=ranks,
        microbatches=size.microbatches,
        stages_per_rank=size.blocks // ranks,
    )
    modules = stages_of(size, plan.stages, device)
    options: dict[str, Any] = {"loss_fn": loss_fn, "example": (words[:1],), "device": device}
    options |= {"ranks": ranks} if local else {}

    def made(name: str, plan: Plan, *, checkpoints: bool = False) -> Run:
        return Run(name, tl.Pipeline(modules, schedule=plan, **options), checkpoints, [])

    plain = made("plain", plan)
    for _ in range(3):
        plain.step(words)
    one, both = bandwidth(device, 1 << (20 if device.type == "cpu" else 28))
    if not local:  # one plan needs the same costs on all ranks
        found = torch.tensor([one, both], dtype=torch.float64, device=device)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN)
        one, both = found.tolist()
    with plain.pipe.trace() as trace:
        plain.step(words)
    keeps = tuple(float(need.keeps) for need in plain.pipe._built.table.needs or ())
    copies = tuple(1e3 * each / both for each in keeps)
    traced = replace(Costs.from_timeline(trace.timeline), activation=keeps)
    costs = replace(traced, offload=copies, reload=copies)
    say = plain.pipe.is_first
    if say:
        print(
            f"{ranks} {'local' if local else 'nccl'} ranks: {one / 1e9:.1f} GB/s one way, "
            f"{both / 1e9:.1f} GB/s each way of both; a stage keeps {max(keeps) / 2**30:.2f} GiB, "
            f"copied in {max(copies):.0f} ms"
        )
    runs, again = [plain], replace(traced, recompute=traced.forward)
    for name, each in {"offload": costs, "recompute": again}.items():
        for share in (0.5, 0.3):
            try:
                fitting = fit_memory(plan, each, limits_of(plan, costs, share))
                runs.append(made(f"{name} {share:.0%}", fitting))
            except ScheduleError as error:
                print(f"{name} {share:.0%}: {error}")
    runs.append(made("checkpoint all blocks", plan, checkpoints=True))
    for run in runs[1:]:
        for _ in range(2):
            run.step(words)
    expected_grads: list[Tensor] = []
    for number in range(size.rounds):
        for run in runs:
            call = partial(run.step, words)
            if number:
                run.times.append(timed(call, device))
                continue
            with run.pipe.trace():
                run.peak = peak_of(call, device)
                with deterministic():
                    call()
            grads = [p.grad for p in run.pipe.parameters() if p.grad is not None]
            expected_grads = expected_grads or [grad.clone() for grad in grads]
            if run is plain:  # attention's backward may add up in another order each time
                with run.pipe.trace(), deterministic():
                    call()
            run.exact = all(map(torch.equal, grads, expected_grads))
    if say:
        report(runs, costs, local=local)


def report(runs: Sequence[Run], costs: Costs, *, local: bool) -> None:
    """Print the table."""
    plain = runs[0]
    whole = expected(plain.pipe.plan, costs, local=local)
    print(
        f"{'':22} {'time':>8} {'ratio':>7} {'by plan':>8} {'peak':>10} {'ratio':>7} {'by plan':>8}"
    )
    for run in runs:
        time_, peak = expected(run.pipe.plan, costs, local=local)
        # The plan knows nothing of checkpoints inside of stages.
        by_plan = [f"{x / y:.3f}" for x, y in zip((time_, peak), whole, strict=True)]
        by_plan = ["", ""] if run.checkpoints else by_plan
        median = statistics.median(run.times)
        print(
            f"{run.name:22} {median:6.3f} s {median / statistics.median(plain.times):7.3f} "
            f"{by_plan[0]:>8} {run.peak / 2**30:6.2f} GiB "
            f"{run.peak / (plain.peak or 1.0):7.3f} {by_plan[1]:>8} "
            f"{'exact' if run.exact else 'NOT EXACT'}",
            flush=True,
        )


def expected(plan: Plan, costs: Costs, *, local: bool) -> tuple[float, float]:
    """The time and the peak by the plan.

    Local ranks compute in turn, and one that waits for a copy is no reason for others to wait: they
    take as long as all of their work, or as the copies of one direction.
    """
    if not local:
        return simulate(plan, costs).makespan, float(peak_memory(plan, costs)[0])
    durations, kind = costs.durations(plan), plan.rows.kind
    copies = [durations[kind == each].sum() for each in (Kind.OFFLOAD, Kind.RELOAD)]
    work = durations.sum() - sum(copies)
    return float(max(work, *copies)), float(peak_memory(plan, costs).sum())


def nccl_rank(rank: int, size: Size, port: int) -> None:
    """One of two processes on a GPU, which nccl takes for two hosts."""
    os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cuda:0")
    torch.distributed.init_process_group("nccl", rank=rank, world_size=2, device_id=device)
    compare(size, 2, device, local=False)
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--only", choices=("local", "nccl"))
    options = parser.parse_args()
    if options.tiny or not torch.cuda.is_available():
        compare(TINY, 4, torch.device("cpu"), local=True)
        return
    if options.only != "nccl":
        compare(SIZES["local"], 4, torch.device("cuda:0"), local=True)
        gc.collect()
        torch.cuda.empty_cache()
    if options.only != "local":
        spawn(nccl_rank, (SIZES["nccl"], 29533), nprocs=2)


if __name__ == "__main__":
    main()
