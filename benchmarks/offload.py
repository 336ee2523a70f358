"""Plans that offload or recompute activations, beside the same plan without, and checkpointing.

    python benchmarks/offload.py                     4 local ranks and 2 nccl ranks on one GPU
    python benchmarks/offload.py --only nccl
    python benchmarks/offload.py --tiny              on the CPU, a small model: what is printed

A GPT with long sequences. The work for each byte that a forward keeps grows with the length of the
sequence, and with the width only where that is as large: a narrow model stands for wide ones. All
ranks share the GPU and its link to the host, so the bandwidth of a rank is measured while all of
them copy in both directions. Costs are those of a traced step that keeps everything, and so is what
a step needs beside activations: gradients of the backward that runs, and messages.

Printed are the times of steps, of all ways in turns; the peak of what the allocator had in a step,
less what it had before (weights, gradients); both as the plan says; and how long the computation
has waited for copies: to the host, before memory is free, and back, before a backward. Peaks and
waits are those of traced steps, which follow the plan also on local ranks.
At the end, gradients are compared with those of the plan that keeps everything, to the last bit, by
deterministic kernels: attention's quicker backward adds up in another order each time.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline.plan import Costs, Kind, Plan, build, fit_memory, lower, peak_memory
from taktline.plan.action import COPIES, Action, Overlap
from taktline.plan.deps import needs
from taktline.plan.rows import Rows
from taktline.plan.sharing import predict
from taktline.plan.timeline import Timeline
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
    ways: Sequence[str] = ("recompute", "checkpoint", "exact")
    shares: Sequence[float] = (0.5, 0.3)
    """Of the memory, which offload is to keep within."""


GPT = Size(128, 147456, 12, 4, 3)
TINY = Size(64, 64, 8, 8, 2)
WORDS = 256


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


def bandwidth(device: torch.device, nbytes: int, ranks: int) -> float:
    """Bytes per second of a rank in each direction, while all ``ranks`` of a link copy in both."""
    copies = copies_on(device)
    here = torch.empty(2, nbytes, dtype=torch.uint8, device=device)
    hosts = [copies.take(nbytes), copies.take(nbytes)]

    def both() -> None:
        for _ in range(4):
            copies.copy([(hosts[0], here[0])], inward=False)
            copies.copy([(here[1], hosts[1])], inward=True)
        copies.synchronize()

    times: list[float] = []
    for _ in range(4):
        if ranks > 1:
            torch.distributed.barrier()
        times.append(timed(both, device)[0])
    copies.give(hosts)
    return 4 * nbytes / statistics.median(times)


def most(number: float, device: torch.device, *, local: bool) -> float:
    """The largest on all ranks, whose plans must be the same."""
    found = torch.tensor(number, dtype=torch.float64, device=device)
    if not local:
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.item()


def timed(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds of a call with what it has told a GPU, and of the call alone."""
    settle(device)
    began = time.perf_counter()
    call()
    told = time.perf_counter()
    settle(device)
    return time.perf_counter() - began, told - began


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Run:
    """One way to train, and what was measured of it."""

    name: str
    pipe: tl.Pipeline
    checkpoints: bool = False
    times: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)
    """How long a step has kept the host."""
    timeline: Timeline = field(init=False)
    peak: float = 0.0

    def step(self, words: Tensor) -> None:
        """A step from gradients of zero; all ways train the same modules."""
        for module in self.pipe.modules():
            if isinstance(module, Block):
                module.checkpoints = self.checkpoints
        for p in self.pipe.parameters():
            if p.grad is not None:
                p.grad.zero_()
        self.pipe.step(words, target=words)

    def measure(self, words: Tensor, device: torch.device) -> None:
        """The peak and the timeline of a traced step."""
        with self.pipe.trace() as trace:
            self.peak = peak_of(partial(self.step, words), device)
        self.timeline = trace.timeline
        if self.pipe.is_first:
            where = f"{self.timeline.makespan:.0f} ms traced, {self.peak / 2**30:.2f} GiB"
            print(f"  {self.name}: {where}, {allocations(device)} allocations so far", flush=True)

    def gradients(self, words: Tensor) -> list[Tensor]:
        """Those of a step, by deterministic kernels."""
        with self.pipe.trace(), deterministic():
            self.step(words)
        return [p.grad.clone() for p in self.pipe.parameters() if p.grad is not None]


def allocations(device: torch.device) -> int:
    """How often memory was got from the device, which waits for it."""
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return stats.get("num_device_alloc", 0) + stats.get("num_device_free", 0)


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
    """Inside, sums have one order; with ``warn_only``, attention's backward would have many."""
    torch.use_deterministic_algorithms(True)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def limits_of(plan: Plan, costs: Costs, share: float, extra: float, *, local: bool) -> list[float]:
    """For each rank, what is left of a share of its peak without the ``extra`` that a step needs.

    Local ranks have a share of all their peaks together. None has less than two activations.
    """
    peaks, least = peak_memory(plan, costs), 2.05 * costs.of("activation", plan.stages).max()
    if not local:
        return np.maximum(share * peaks - (1 - share) * extra, least).tolist()
    scale, most = share, share * peaks.sum() - (1 - share) * extra
    while scale > 0.01 and np.maximum(scale * peaks, least).sum() > most:
        scale *= 0.98
    return np.maximum(scale * peaks, least).tolist()


def again(plan: Plan, costs: Costs, *, local: bool) -> Plan:
    """The plan with forwards that run again, in the memory of one that does so with all.

    That is: with all whose backward does not follow at once. Where ranks have memory of their own,
    the planner finds more that need not.
    """
    by_rank: list[Rows] = []
    for rank in range(plan.ranks):
        rows, made = plan.rows_of(rank), list[Action | Overlap]()
        for action in map(rows.leaf, range(len(rows))):
            if action.kind == Kind.B and made[-1] != replace(action, kind=Kind.F):
                made.append(replace(action, kind=Kind.RECOMPUTE))
            made.append(action)
        by_rank.append(Rows.from_actions(made))
    all_again = plan.with_rows(by_rank)
    limits = peak_memory(all_again, costs).tolist()
    found = fit_memory(plan, replace(costs, offload=None, reload=None), limits)
    times = {plan: expected(plan, costs, local=local) for plan in (all_again, found)}
    fits = [plan for plan in times if times[plan][1] <= times[all_again][1]]
    return min(fits, key=lambda plan: times[plan][0])


def compare(size: Size, ranks: int, device: torch.device, *, local: bool) -> None:
    """Plans that save memory beside the one that does not."""
    torch.manual_seed(0)  # the same on all ranks
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
        return Run(name, tl.Pipeline(modules, schedule=plan, **options), checkpoints)

    plain = made("plain", plan)
    for _ in range(2):
        plain.step(words)
    speed = bandwidth(device, 1 << (20 if device.type == "cpu" else 28), 1 if local else ranks)
    speed = -most(-speed, device, local=local)
    plain.measure(words, device)
    costs = costs_of(plain, speed, local=local)
    say = plain.pipe.is_first
    if say:
        described(plan, costs, speed, local=local)
    own = 0 if local else torch.distributed.get_rank()
    known = expected(plan, costs, local=True)[1] if local else peak_memory(plan, costs)[own]
    extra = most(max(0.0, plain.peak - known), device, local=local)
    runs, copied = [plain], replace(costs, recompute=None)
    for share in size.shares:
        limits = limits_of(plan, costs, share, extra, local=local)
        runs.append(made(f"offload {share:.0%}", fit_memory(plan, copied, limits)))
    if "recompute" in size.ways:
        runs.append(made("recompute", again(plan, costs, local=local)))
    if "checkpoint" in size.ways:
        runs.append(made("checkpoint all blocks", plan, checkpoints=True))
    for run in runs[1:]:
        run.step(words)
        run.measure(words, device)
    before = allocations(device)
    for _ in range(size.rounds):
        for run in runs:
            took, told = timed(partial(run.step, words), device)
            run.times.append(took)
            run.told.append(told)
    if say and size.rounds:
        report(runs, costs, extra, local=local)
        print(f"{allocations(device) - before} allocations in {size.rounds} turns", flush=True)
    expected_ = plain.gradients(words) if "exact" in size.ways else []
    for run in runs if "exact" in size.ways else ():  # the plain one again
        exact = all(map(torch.equal, run.gradients(words), expected_))
        if say:
            print(f"gradients of {run.name}: {'equal' if exact else 'NOT EQUAL'}", flush=True)


def costs_of(plain: Run, speed: float, *, local: bool) -> Costs:
    """What its actions cost, in milliseconds, with copies at a speed in bytes per second."""
    needs = plain.pipe._built.table.needs or ()
    traced = Costs.from_timeline(plain.timeline)
    if local:  # an action by itself: its rank has waited for the others, which compute in turn
        took = [plain.timeline.durations(kind).mean(axis=1) for kind in (Kind.F, Kind.B)]
        traced = replace(traced, forward=tuple(took[0]), backward=tuple(took[1]))
    known = replace(traced, activation=tuple(float(need.keeps) for need in needs))
    return known.saving([0.0, *(float(need.sends) for need in needs[:-1])], speed / 1e3)


def described(plan: Plan, costs: Costs, speed: float, *, local: bool) -> None:
    """Print the model of costs."""
    names = ("forward", "backward", "offload")
    times = [f"{name} {np.median(costs.of(name, plan.stages)):.1f} ms" for name in names]
    keeps = np.median(costs.of("activation", plan.stages)) / 2**30
    print(
        f"{plan.ranks} {'local' if local else 'nccl'} ranks: {speed / 1e9:.1f} GB/s of a rank each "
        f"way of both; a stage keeps {keeps:.2f} GiB; {', '.join(times)}"
    )


def report(runs: Sequence[Run], costs: Costs, extra: float, *, local: bool) -> None:
    """Print the table."""
    plain = runs[0]
    whole = expected(plain.pipe.plan, costs, local=local)
    offset = 1e3 * statistics.median(plain.times) / whole[0]
    heads = ["time", "ratio", "by plan", "peak", "ratio", "by plan", "to host", "back", "host"]
    print(f"{'':22} {' '.join(f'{head:>9}' for head in heads)}")
    for run in runs:
        time_, peak = expected(run.pipe.plan, costs, local=local)
        by_plan = [f"{time_ / whole[0]:.3f}", f"{(peak + extra) / (whole[1] + extra):.3f}"]
        by_plan = ["", ""] if run.checkpoints else by_plan
        median = statistics.median(run.times)
        cells = [
            f"{median:.3f} s",
            f"{median / statistics.median(plain.times):.3f}",
            by_plan[0],  # no plan knows of checkpoints
            f"{run.peak / 2**30:.2f} GiB",
            f"{run.peak / (plain.peak or 1.0):.3f}",
            by_plan[1],
            *(f"{ms:.0f} ms" for ms in waits(run.timeline, local=local)),
            f"{statistics.median(run.told):.3f} s",
        ]
        print(f"{run.name:22} {' '.join(f'{cell:>9}' for cell in cells)}")
        print("    turns", *(f"{x:.3f}" for x in run.times), speeds_of(run, costs))
    print(f"measured / predicted of plain: {offset:.3f}", flush=True)


def speeds_of(run: Run, costs: Costs) -> str:
    """How long copies took, by their prediction; and computations by those of the plain plan."""
    timeline, text = run.timeline, list[str]()
    rows, took = timeline.plan.rows, timeline.end - timeline.start
    names = ("forward", "backward", "recompute", "offload", "reload")
    kinds = (Kind.F, Kind.B, Kind.RECOMPUTE, Kind.OFFLOAD, Kind.RELOAD)
    for name, kind in zip(names, kinds, strict=True):
        at = rows.kind == kind
        if at.any():
            known = costs.of(name, timeline.plan.stages)[rows.stage[at]]
            text.append(f"{name} {took[at].sum() / known.sum():.3f}")
    return f"{timeline.makespan:.0f} ms traced; times by the model: {', '.join(text)}"


def waits(timeline: Timeline, *, local: bool) -> tuple[float, float]:
    """How long rank 0, or the thread of local ranks, has waited for copies: to the host, and back.

    It waits for a copy to the host before the next copy, which in a thread of all ranks shows as a
    gap; and for one that comes back in the backward.
    """
    plan, start, end = timeline.plan, timeline.start, timeline.end
    mine = np.flatnonzero(np.full(len(end), local) | (plan.rank_of_rows() == 0))
    copy, kind = needs(plan).copy, plan.rows.kind
    backs = mine[np.isin(kind[mine], (Kind.B, Kind.I)) & (copy[mine] >= 0)]
    back = np.maximum(end[copy[backs]] - start[backs], 0.0).sum()
    computes = mine[kind[mine] <= Kind.W]
    computes = computes[np.argsort(start[computes], kind="stable")]
    if local:
        return float(np.maximum(start[computes[1:]] - end[computes[:-1]], 0.0).sum()), float(back)
    copies = mine[np.isin(kind[mine], COPIES) & (copy[mine] >= 0)]
    before = computes[np.searchsorted(computes, copies) - 1]
    return float(np.maximum(end[copy[copies]] - end[before], 0.0).sum()), float(back)


def expected(plan: Plan, costs: Costs, *, local: bool) -> tuple[float, float]:
    """The time and the peak by the plan: of all local ranks together, or of the first rank."""
    if not local:
        makespan = predict(plan, costs, spinning=True).makespan
        return makespan, float(peak_memory(plan, costs)[0])
    return in_one_thread(plan, costs)


def in_one_thread(plan: Plan, costs: Costs) -> tuple[float, float]:
    """The time and the peak of local ranks, which compute in turn and share one link."""
    rows, rank_of = merged(lower(plan)), plan.placement.rank_of
    one = Plan([rows], plan.placement.custom([0] * plan.stages, 1), plan.microbatches)
    keeps, little = (
        costs.of(name, plan.stages).tolist() for name in ("activation", "kept_for_recompute")
    )
    actions = [rows.leaf(row) for row in range(len(rows))]
    again = {(x.stage, x.microbatch) for x in actions if x.kind == Kind.RECOMPUTE}
    now, used, peak, free = 0.0, 0.0, 0.0, dict.fromkeys(COPIES, 0.0)
    leaving, there = dict[int, tuple[float, float]](), dict[object, float]()
    for action, took in zip(actions, costs.durations(one).tolist(), strict=True):
        kind, stage, place = action.kind, action.stage, (action.stage, action.microbatch)
        if kind in free:
            until, size = leaving.pop(rank_of[stage], (0.0, 0.0))
            now, used = max(now, until), used - size
            free[kind] = max(now, free[kind]) + took
            if kind == Kind.OFFLOAD:
                leaving[rank_of[stage]] = free[kind], keeps[stage]
            else:
                there[place] = free[kind]
                used += keeps[stage]
        else:
            now = max(now, there.get(place, 0.0)) + took
            if kind == Kind.F:
                used += little[stage] if place in again else keeps[stage]
            elif kind == Kind.RECOMPUTE:
                used += keeps[stage] - little[stage]
        peak = max(peak, used)
        used -= keeps[stage] * (kind == Kind.B)
    return now, peak


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
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--only", choices=("local", "nccl"))
    parser.add_argument("--length", type=int, default=GPT.length, help="of a sequence")
    parser.add_argument("--width", type=int, default=GPT.width, help="of the model")
    parser.add_argument("--rounds", type=int, default=GPT.rounds, help="steps that are timed")
    parser.add_argument("--ways", nargs="*", default=GPT.ways, help="others to save memory")
    parser.add_argument("--shares", nargs="*", type=float, default=GPT.shares, help="of memory")
    options = parser.parse_args()
    given = {
        name: getattr(options, name) for name in ("length", "width", "rounds", "ways", "shares")
    }
    size = replace(GPT, **given)
    if options.tiny or not torch.cuda.is_available():
        compare(
            replace(TINY, ways=size.ways, shares=size.shares), 4, torch.device("cpu"), local=True
        )
        return
    if options.only != "nccl":
        compare(size, 4, torch.device("cuda:0"), local=True)
        gc.collect()
        torch.cuda.empty_cache()
    if options.only != "local":
        spawn(nccl_rank, (size, 29533), nprocs=2)


if __name__ == "__main__":
    main()
