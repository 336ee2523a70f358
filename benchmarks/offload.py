"""Offload and recompute as part of the plan, on one GPU: memory, time, and the same gradients.

    python benchmarks/offload.py            4 local ranks, then 2 nccl ranks that share the GPU
    python benchmarks/offload.py --tiny     the same script on the CPU, in seconds

A GPT with long sequences in 1F1B. First the bandwidth of a rank to and from the host is measured,
alone and with both directions at once, and how long each stage computes. From these the plans are
made, which offload as much as halves the peak of activations, or leaves 30% of it. The peak is what
the allocator had at most in a step, less what it had before (weights, gradients); it has all ranks
of a process. Then stages are recomputed so that the peak is that of ``torch.utils.checkpoint``
around all blocks. All take turns; times are medians. Gradients are compared with those of the plan
that saves nothing.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline.errors import ScheduleError
from taktline.plan import Costs, Plan, build, fit_memory, lower, peak_memory, simulate
from taktline.runtime.runnable_plan import merged
from taktline.stage.offload import copies_on


@dataclass(frozen=True)
class Size:
    """What is trained."""

    width: int
    length: int
    blocks: int
    microbatches: int
    rounds: int


SIZES = {"local": Size(4096, 16384, 8, 8, 3), "nccl": Size(4096, 16384, 4, 8, 3)}
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
    plan: Plan
    times: list[float]
    peak: float = 0.0


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


def compare(size: Size, ranks: int, device: torch.device, *, local: bool) -> None:
    """Plans that save memory beside the one that does not."""
    words = torch.randint(WORDS, (size.microbatches, size.length), device=device)
    plan = build("1f1b", ranks=ranks, microbatches=size.microbatches)
    modules = stages_of(size, ranks, device)
    options: dict[str, Any] = {"loss_fn": loss_fn, "example": (words[:1],), "device": device}
    options |= {"ranks": ranks} if local else {}

    def made(name: str, plan: Plan, *, checkpoints: bool = False) -> Run:
        copied = copy.deepcopy(modules)
        for module in copied:
            for block in module.modules():
                if isinstance(block, Block):
                    block.checkpoints = checkpoints
        return Run(name, tl.Pipeline(copied, schedule=plan, **options), plan, [])

    def step(run: Run) -> None:
        run.pipe.step(words, target=words)

    def fresh(run: Run) -> None:
        for p in run.pipe.parameters():
            if p.grad is not None:
                p.grad.zero_()

    plain = made("plain", plan)
    for _ in range(3):
        step(plain)
    one, both = bandwidth(device, 1 << (20 if device.type == "cpu" else 28))
    with plain.pipe.trace() as trace:
        step(plain)
    keeps = tuple(float(need.keeps) for need in plain.pipe._built.table.needs or ())
    copies = tuple(1e3 * size / both for size in keeps)
    costs = replace(
        Costs.from_timeline(trace.timeline), activation=keeps, offload=copies, reload=copies
    )
    say = plain.pipe.is_first
    if say:
        print(
            f"{ranks} {'local' if local else 'nccl'} ranks: {one / 1e9:.1f} GB/s one way, "
            f"{both / 1e9:.1f} GB/s each way of both; a stage keeps {max(keeps) / 2**30:.2f} GiB, "
            f"copied in {max(copies):.0f} ms"
        )
    runs = [plain]
    peaks = peak_memory(plan, costs)
    again = replace(costs, offload=None, recompute=costs.forward)
    for name, each in {"offload": costs, "recompute": again}.items():
        for share in (0.5, 0.3):
            try:
                found = fit_memory(plan, each, list(share * peaks))
            except ScheduleError as error:
                if say:
                    print(f"{name} {share:.0%}: {error}")
                continue
            runs.append(made(f"{name} {share:.0%}", found))
    runs.append(made("checkpoint all blocks", plan, checkpoints=True))
    for run in runs[1:]:
        for _ in range(2):
            step(run)
    for number in range(size.rounds):
        for run in runs:
            fresh(run)
            if number == 0:
                run.peak = peak_of(lambda run=run: step(run), device)
            else:
                run.times.append(timed(lambda run=run: step(run), device))
    report(runs, costs, local=local, say=say)


def report(runs: Sequence[Run], costs: Costs, *, local: bool, say: bool) -> None:
    """Print the table."""
    plain = runs[0]
    median = {run.name: statistics.median(run.times) for run in runs}
    predicted = {run.name: expected(run.plan, costs, local=local) for run in runs}
    if say:
        print(f"{'':22} {'time':>8} {'ratio':>6} {'by plan':>8} {'peak':>10} {'ratio':>6} by plan")
    for run in runs:
        ours = list(run.pipe.parameters())
        theirs = list(plain.pipe.parameters())
        exact = all(
            torch.equal(a.grad, b.grad)
            for a, b in zip(ours, theirs, strict=True)
            if a.grad is not None and b.grad is not None
        )
        time_ratio = median[run.name] / median["plain"]
        by_plan, peak = (predicted[run.name][i] / (predicted["plain"][i] or 1.0) for i in range(2))
        if say:
            print(
                f"{run.name:22} {median[run.name]:6.3f} s {time_ratio:6.3f} {by_plan:8.3f} "
                f"{run.peak / 2**30:6.2f} GiB {run.peak / (plain.peak or 1.0):6.3f} {peak:7.3f} "
                f"{'exact' if exact else 'NOT EXACT'}",
                flush=True,
            )


def expected(plan: Plan, costs: Costs, *, local: bool) -> tuple[float, float]:
    """The time and the peak by the plan; of local ranks, which share the GPU, all work in turn."""
    if not local:
        return simulate(plan, costs).makespan, float(peak_memory(plan, costs)[0])
    one = Plan.from_actions([[str(a) for a in merged(lower(plan)).actions()]])
    return simulate(one, costs).makespan, float(peak_memory(one, costs)[0])


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
    if options.tiny:
        compare(TINY, 4, torch.device("cpu"), local=True)
        return
    if options.only != "nccl":
        compare(SIZES["local"], 4, torch.device("cuda:0"), local=True)
        gc.collect()
        torch.cuda.empty_cache()
    if options.only != "local":
        torch.multiprocessing.spawn(nccl_rank, (SIZES["nccl"], 29533), nprocs=2)


if __name__ == "__main__":
    main()
