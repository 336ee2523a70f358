"""Why zero-bubble plans are predicted too short where ranks share a GPU, and auto's choice.

    python benchmarks/_diagnose.py --backend nccl --ranks 4 --output $OUT
    python benchmarks/_diagnose.py                                 tiny, 4 ranks over gloo

Each part runs in processes of its own and with a limit, so that one that fails stops no other:

    schedules   the benchmark of predictions, with each schedule traced, too, and predicted from
                costs that come from different places
    small       how processes share the GPU: products, waiting receives, messages, and F, B, I and W
                of one rank alone and of several at once, without messages
    auto        all named schedules with counted and with measured cuts, and what auto chooses, both
                as a pipeline and as it is tried
    two         ``schedules`` with 2 ranks

All timelines are written to files, so that other predictions can be tried later.
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import prediction
import torch
import torch.distributed as dist
from _peers import run_ranks
from pipeline import GPT, surprise
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import taktline as tl
from taktline.plan import Action, Costs, Kind, Placement, Plan, Timeline, names
from taktline.plan.io import to_json
from taktline.plan.rows import Rows
from taktline.plan.sharing import predict, work
from taktline.plan.units import contiguous, measured, one_by_one, with_overhead
from taktline.train import auto
from taktline.train.ranks import Ranks, find_ranks
from taktline.train.trial import Batches, copies, scheduled, traced, waited

KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
TINY = os.environ.get("TAKTLINE_DIAGNOSE_TINY") == "1"
LIMITS = {"schedules": 110, "small": 70, "auto": 220, "two": 60}
"""Seconds after which a part is ended."""


def say(rank: int, *words: object) -> None:
    """Print at once, on rank 0."""
    if rank == 0:
        print(*words, flush=True)


@contextmanager
def section(rank: int, name: str) -> Iterator[None]:
    """A section whose error is printed; deterministic errors occur on all ranks alike."""
    begin = time.perf_counter()
    say(rank, f"\n--- {name}")
    try:
        yield
    except Exception:  # printed, so that the next section runs
        print(f"rank {rank}: {name} failed\n{traceback.format_exc()}", flush=True)
    say(rank, f"    ({time.perf_counter() - begin:.1f} s)")


def start_of(count: int, backend: str) -> tuple[torch.device, Ranks]:
    device = torch.empty(0, device="cuda" if backend == "nccl" else "cpu").device
    options: dict[str, Any] = {"device": device, "default": 1, "timeout": None}
    return device, find_ranks(None, None, None, **options)


# --- schedules ---------------------------------------------------------------------------------


def split_1f1b(plan: Plan) -> Plan:
    """1F1B with I and W for each B but those of the first rank: the same order and messages."""
    by_rank = []
    for rank in range(plan.ranks):
        actions: list[Action] = []
        for row in range(len(plan.rows_of(rank))):
            each = plan.rows_of(rank).leaf(row)
            kinds = (Kind.I, Kind.W) if each.kind == Kind.B else (each.kind,)
            actions += [Action(each.stage, kind, each.microbatch) for kind in kinds]
        by_rank.append(Rows.from_actions(actions))
    return Plan(by_rank, plan.placement, plan.microbatches, name="1f1b_split")


def late_1f1b(plan: Plan) -> Plan:
    """The same, but every W at the end of its rank: nothing that could fill a wait."""
    split = split_1f1b(plan)
    by_rank = []
    for rank in range(plan.ranks):
        rows = split.rows_of(rank)
        late = np.argsort(rows.kind == Kind.W, kind="stable")
        by_rank.append(rows[late])
    return Plan(by_rank, plan.placement, plan.microbatches, name="1f1b_late")


def schedules(rank: int, count: int, backend: str, seconds: float, output: str) -> None:
    """Costs from different places against the times of all schedules."""
    if TINY:
        prediction.SIZES[backend] = (32, 4, 1)
    model = prediction.Model(2 * count, backend)
    _, ranks = start_of(count, backend)
    data = prediction.batches(model)
    m = prediction.MICROBATCHES
    bounds, single = tuple(range(0, 2 * count + 1, 2)), tuple(range(2 * count + 1))
    saved: dict[str, list[Timeline]] = {}
    fine = contiguous(count, bounds, m)
    plain = tl.build("1f1b", ranks=count, microbatches=m)
    pieces = model.stages(single, fine, rank)
    alone = saved["alone"] = traced(pieces, one_by_one(fine.placement, 4), ranks, data)
    fines = saved["fine"] = traced(pieces, fine, ranks, data)
    whole = saved["whole"] = traced(model.stages(bounds, plain, rank), plain, ranks, data)
    units = with_overhead(measured(alone, fines), whole, bounds)
    size = 4.0 * model.rows * model.width
    units = replace(units, sizes=np.array([[0.0], [0.0], [size]]))
    say(rank, f"cores {units.cores:.3f}; send {units.send:.3f}, flight {units.flight:.3f} ms; ")
    say(rank, "overhead of F, B, I, W", np.round(units.overhead, 3))
    say(rank, "units: F, B, I, W of each piece (ms of a core)\n", np.round(units.times, 3))
    for name, each in (("alone", alone), ("fine 1f1b", fines), ("whole 1f1b", whole)):
        with section(rank, f"traced {name}"):
            kinds_of(rank, each, units.cores)
    plans: dict[str, tuple[Plan, tuple[int, ...]]] = {}
    for name, stages in (*prediction.SCHEDULES.items(), ("zb_h2", 1)):
        plan = tl.build(name, ranks=count, microbatches=m, stages_per_rank=stages)
        plans[name] = plan, bounds if stages == 1 else single
    plans |= {"1f1b_split": (split_1f1b(plain), bounds), "1f1b_late": (late_1f1b(plain), bounds)}
    steps: dict[str, Callable[[], object]] = {}
    made: dict[str, Any] = {}
    with ExitStack() as stack:
        for name, (plan, cuts) in plans.items():
            kept = scheduled(model.stages(cuts, plan, rank), plan, ranks, data)
            made[name], steps[name] = stack.enter_context(kept)
        with section(rank, "steps with and without a trace, in turns (ms)"):
            times: dict[str, list[float]] = {name: [] for name in plans}
            slow: dict[str, list[float]] = {name: [] for name in plans}
            host: dict[str, list[float]] = {name: [] for name in plans}
            gc.collect()
            gc.disable()
            begin = time.perf_counter()
            for turn in range(40):
                for name, step in steps.items():
                    times[name].append(waited(lambda n=name, s=step: hosted(s, host[n]), ranks))
                    if turn % 3 == 1 and len(slow[name]) < 4:
                        with made[name].trace() as trace:
                            slow[name].append(waited(step, ranks))
                        saved.setdefault(name, []).extend(trace.timelines)
                late = [turn >= 5 and time.perf_counter() - begin > seconds]
                if any(each for (each,) in ranks.transport.exchange(late, "to go on")):
                    break
            gc.enable()
            keep(rank, output, f"schedules{count}", saved, times, units)
            if rank == 0:
                show_times(plans, times, slow, saved, host)
    for name in plans:
        with section(rank, f"traced {name}"):
            kinds_of(rank, saved[name], units.cores)
    with section(rank, "predictions over the untraced median"):
        if rank == 0:
            compare(plans, times, saved, units)


def hosted(step: Callable[[], object], found: list[float]) -> None:
    begin = time.perf_counter()
    step()
    found.append(1e3 * (time.perf_counter() - begin))


def show_times(
    plans: dict[str, Any],
    times: dict[str, list[float]],
    slow: dict[str, list[float]],
    saved: dict[str, list[Timeline]],
    host: dict[str, list[float]],
) -> None:
    print("host: until step() returns on rank 0")
    print(f"{'':24}{'plain':>9}{'quart.':>15}{'host':>9}{'traced':>9}{'timeline':>9}{'n':>4}")
    for name in plans:
        low, middle, high = np.quantile(times[name], [0.25, 0.5, 0.75])
        spans = median(each.makespan for each in saved[name])
        print(
            f"{name:24}{middle:9.2f}{low:8.1f}{high:7.1f}{median(host[name]):9.2f}{median(slow[name]):9.2f}{spans:9.2f}"
            f"{len(times[name]):4}"
        )


def kinds_of(rank: int, timelines: list[Timeline], cores: float) -> None:
    """Mean and median of each kind of action: from start to end, and of its share of a core."""
    if rank:
        return
    lines: list[str] = []
    for r in range(timelines[0].plan.ranks):
        cells = [f"rank {r}"]
        for kind in KINDS:
            long: list[float] = []
            shares: list[float] = []
            for each in timelines:
                rows = each.plan.rows
                mine = (rows.kind == kind) & (each.plan.rank_of_rows() == r)
                long += (each.end - each.start)[mine].tolist()
                shares += work(each, cores)[mine].tolist()
            if long:
                text = f"{np.mean(long):6.2f} {median(long):6.2f} ({np.mean(shares):5.2f})"
                cells.append(f"{kind.name} {len(long) // len(timelines):3}× {text}")
        lines.append("  ".join(cells))
    print("mean, median (share of a core), ms\n" + "\n".join(lines))
    busy = np.median([each.busy for each in timelines], axis=0)
    spans = np.median([each.rank_spans for each in timelines], axis=0)
    total = np.median([per_rank_work(each, cores) for each in timelines], axis=0)
    last = timelines[-1]
    sends = np.isin(last.plan.rows.kind, (Kind.SEND_F, Kind.SEND_B))
    flight = Costs.from_timeline(last).link.latency
    print(
        f"makespan {median(t.makespan for t in timelines):.2f}; ranks: busy {np.round(busy, 1)}, "
        f"span {np.round(spans, 1)}, core {np.round(total, 1)} = {total.sum():.1f}; "
        f"{int(sends.sum())} messages, {flight:.2f} ms in flight, sends last "
        f"{np.median((last.end - last.start)[sends]) if sends.any() else 0.0:.2f}"
    )
    both = occupancy(last)
    print("share of the time in which so many ranks compute:", np.round(both, 3))


def per_rank_work(timeline: Timeline, cores: float) -> Any:
    computes = timeline.plan.rows.kind <= Kind.W
    spent = work(timeline, cores)[computes]
    return np.bincount(timeline.plan.rank_of_rows()[computes], spent, timeline.plan.ranks)


def occupancy(timeline: Timeline) -> Any:
    """For each number of ranks, the share of the makespan in which so many compute."""
    computes = timeline.plan.rows.kind <= Kind.W
    start, end = timeline.start[computes], timeline.end[computes]
    at = np.concatenate([[0.0], start, end])
    change = np.repeat([0, 1, -1], [1, len(start), len(end)])
    order = np.argsort(at, kind="stable")
    active, lengths = np.cumsum(change[order])[:-1], np.diff(at[order])
    return np.bincount(active, lengths, timeline.plan.ranks + 1) / timeline.makespan


def compare(
    plans: dict[str, tuple[Plan, tuple[int, ...]]],
    times: dict[str, list[float]],
    saved: dict[str, list[Timeline]],
    units: Any,
) -> None:
    """Ratios of predicted to measured: which part of the costs, or of the model, is wrong."""
    own = {name: own_costs(saved[name], units.cores) for name in plans}
    base = {n: predict(p, units.costs(c, p.placement), units.cores) for n, (p, c) in plans.items()}
    beside = median(times["1f1b"]) - base["1f1b"].makespan
    print(f"1f1b takes {beside:.2f} ms beside its prediction, which 'now' adds")
    print("now: units of 1f1b; own: costs of the plan's own trace, shared cores; free: the same, ")
    print("start to end without sharing; IW: 'now' with I and W of the own trace; sum: all work")
    print(f"{'':24}{'now':>8}{'own':>8}{'free':>8}{'IW':>8}{'sum/cores':>10}")
    for name, (plan, cuts) in plans.items():
        step = median(times[name])
        known = units.costs(cuts, plan.placement)
        shared, free = own[name], own_costs(saved[name], np.inf)
        n = plan.stages
        mixed = replace(
            known,
            backward_input=some(shared, "backward_input", n, known),
            backward_weight=some(shared, "backward_weight", n, known),
        )
        total = median(per_rank_work(each, units.cores).sum() for each in saved[name])
        cells = [
            base[name].makespan + beside,
            predict(plan, shared, units.cores).makespan,
            predict(plan, free).makespan,
            predict(plan, mixed, units.cores).makespan + beside,
        ]
        ratios = "".join(f"{each / step:8.3f}" for each in cells)
        print(f"{name:24}{ratios}{total / min(units.cores, plan.ranks) / step:10.3f}")


def some(costs: Costs, name: str, stages: int, other: Costs) -> tuple[float, ...]:
    """A cost of each stage, or that of others where it is not known."""
    mine, else_ = costs.of(name, stages), other.of(name, stages)
    return tuple(np.where(np.isfinite(mine) & (mine > 0), mine, else_).tolist())


def own_costs(timelines: list[Timeline], cores: float) -> Costs:
    """The costs that a plan's own traces show."""
    plan = timelines[0].plan
    table = np.full((len(timelines), 4, plan.stages), np.nan)
    for place, each in enumerate(timelines):
        spent = work(each, cores)
        for k, kind in enumerate(KINDS):
            for stage in range(plan.stages):
                mine = (plan.rows.kind == kind) & (plan.rows.stage == stage)
                if mine.any():
                    table[place, k, stage] = spent[mine].mean()
    times = np.nan_to_num(np.median(table, axis=0))
    whole = times[1] > 0
    times[1] = np.where(whole, times[1], times[2] + times[3])
    times[2] = np.where(times[2] > 0, times[2], times[1] / 2)
    times[3] = np.where(times[3] > 0, times[3], times[1] / 2)
    forward, backward, inputs, weights = (tuple(row) for row in times.tolist())
    latency = median(Costs.from_timeline(each).link.latency for each in timelines)
    return Costs(
        forward=forward,
        backward=backward,
        backward_input=inputs,
        backward_weight=weights,
        link=tl.Link(latency=max(0.0, latency)),
    )


def keep(
    rank: int,
    output: str,
    name: str,
    saved: dict[str, list[Timeline]],
    times: dict[str, list[float]],
    units: Any,
) -> None:
    """Write everything that was measured."""
    if rank or not output:
        return
    arrays: dict[str, Any] = {}
    plans: dict[str, str] = {}
    for key, each in saved.items():
        plans[key] = to_json(each[0].plan)
        for place, timeline in enumerate(each):
            columns = np.stack([timeline.start, timeline.end, timeline.arrivals])
            arrays[f"{key}/{place}"] = columns.astype(np.float32)
    for key, took in times.items():
        arrays[f"{key}/steps"] = np.array(took)
    known: dict[str, Any] = {"plans": plans}
    if units is not None:
        arrays["units"] = units.times
        known |= {"cores": units.cores, "send": units.send, "flight": units.flight}
        known |= {"overhead": units.overhead}
    np.savez_compressed(Path(output) / f"{name}.npz", **arrays)
    (Path(output) / f"{name}.json").write_text(json.dumps(known))


# --- small -------------------------------------------------------------------------------------


class Scale(nn.Module):
    """A stage that costs next to nothing, so that the next one has a gradient to return."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def small(rank: int, count: int, backend: str, seconds: float, output: str) -> None:
    """How ranks share the GPU."""
    del seconds, output
    if TINY:
        prediction.SIZES[backend] = (32, 4, 1)
    device, ranks = start_of(count, backend)
    groups = [dist.new_group([each]) for each in range(count)]
    model = prediction.Model(2 * count, backend)
    data = prediction.batches(model)
    x = torch.randn(model.rows, model.width, device=device)
    weight = torch.randn(model.width, 4 * model.width, device=device)
    buffer, others = torch.zeros_like(x), [r for r in range(count) if r]

    def meet() -> None:
        wait(device)
        ranks.transport.exchange([0], "to meet")

    def share(mine: float) -> list[float]:
        """A number of each rank, in microseconds."""
        found = ranks.transport.exchange([round(1e3 * mine)], "a time")
        return [each / 1e3 for (each,) in found]

    def products(number: int) -> None:
        for _ in range(number):
            torch.mm(x, weight)

    def clocked(run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        wait(device)
        return 1e3 * (time.perf_counter() - begin)

    with section(rank, "warm up, and connect"):
        products(20)
        for other in others:
            if rank in (0, other):
                for sender in (0, other):
                    transfer(rank, sender, other if sender == 0 else 0, buffer)
        meet()
    number = 20 if TINY else 300
    with section(rank, f"{number} products on so many ranks: ms of each rank"):
        for active in (1, 2, 3, 4, 1):
            if active > count:
                continue
            for _ in range(2):
                meet()
                took = share(clocked(lambda: products(number)) if rank < active else 0.0)
                say(rank, f"{active} ranks: {took[:active]}")
    with section(rank, "products on rank 0, while others (or it) wait in a receive: ms"):
        for waiting in range(count):
            meet()
            mine = 0.0
            work_ = dist.irecv(buffer, src=0) if rank in others[:waiting] else None
            if rank == 0:
                time.sleep(0.05)  # the others wait by now
                mine = clocked(lambda: products(number))
                for other in others[:waiting]:
                    dist.send(buffer, other)
            if work_ is not None:
                work_.wait()
            say(rank, f"{waiting} others wait: {share(mine)[0]}")
    with section(rank, "a message from 0 to 1, while others compute: ms"):
        for load in ([], [2], [2, 3], [0], [1], [0, 1], [0, 1, 2, 3]):
            took: list[float] = []
            for _ in range(3):
                meet()
                side = torch.cuda.Stream(device) if device.type == "cuda" else None
                if rank in load and side is not None:
                    with torch.cuda.stream(side):
                        products(300)
                mine = 0.0
                if rank in (0, 1):
                    time.sleep(0.02)
                    begin = time.perf_counter()
                    for _ in range(4):
                        for sender in (0, 1):
                            transfer(rank, sender, 1 - sender, buffer)
                        if device.type == "cuda":
                            torch.cuda.current_stream(device).synchronize()
                    mine = 1e3 * (time.perf_counter() - begin) / 8
                took.append(share(mine)[0])
            say(rank, f"load on {load!s:14}: {took}")
    lone = SimpleNamespace(device=device, group=groups[rank], own=(0,), size=1, in_one_process=True)
    stages = {0: Scale().to(device), 1: nn.Sequential(model.piece(2), model.piece(3))}
    halves(rank, count, stages, data, lone, meet, share, device)


def transfer(rank: int, sender: int, receiver: int, buffer: torch.Tensor) -> None:
    if rank == sender:
        dist.send(buffer, receiver)
    elif rank == receiver:
        dist.recv(buffer, sender)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def halves(
    rank: int,
    count: int,
    stages: dict[int, nn.Module],
    data: Batches,
    lone: Any,
    meet: Callable[[], None],
    share: Callable[[float], list[float]],
    device: torch.device,
) -> None:
    """The same stage on each rank, without messages: whole backwards, and halves."""
    m = 8
    orders = {
        "whole": "FB",
        "halves, W soon": "FIW",
        "halves, W at the end": "FI",
    }
    for name, order in orders.items():
        with section(rank, f"{name}: F, B, I, W of one stage, no messages (ms)"):
            plan = one_rank(order, m)
            with scheduled(stages, plan, lone, data) as (schedule, step):
                for active in (1, 2, count, 1, count):
                    meet()
                    mine = 0.0
                    if rank < active:
                        begin = time.perf_counter()
                        for _ in range(3):
                            step()
                        wait(device)
                        mine = 1e3 * (time.perf_counter() - begin) / 3
                    took = share(mine)[:active]
                    meet()
                    lines: dict[str, float] = {}
                    if rank < active:
                        with schedule.trace() as trace:
                            step()
                        lines = kinds_alone(trace.timelines[-1])
                        # What the host needs to start everything, without waiting for the GPU.
                        begin = time.perf_counter()
                        step()
                        lines["host"] = round(1e3 * (time.perf_counter() - begin), 2)
                    meet()
                    say(rank, f"{active} ranks: step {took}, max {max(took)}; rank 0: {lines}")


def one_rank(order: str, microbatches: int) -> Plan:
    """A plan of two stages on a rank; without a W in the order, all come last."""
    actions: list[Action] = []
    held: list[Action] = []
    for m in range(microbatches):
        actions += [Action(0, Kind.F, m), Action(1, Kind.F, m)]
        if "B" in order:
            actions += [Action(1, Kind.B, m)]
        if "I" in order:
            actions += [Action(1, Kind.I, m)]
            # One other action between them, or they are joined.
            (actions if "W" in order else held).extend(
                [Action(0, Kind.B, m), Action(1, Kind.W, m)]
                if "W" in order
                else [Action(1, Kind.W, m)]
            )
        if "W" not in order:
            actions += [Action(0, Kind.B, m)]
    rows = [Rows.from_actions(actions + held)]
    return Plan(rows, Placement.custom([0, 0], 1), microbatches, name="alone")


def kinds_alone(timeline: Timeline) -> dict[str, float]:
    rows, found = timeline.plan.rows, {}
    for kind in KINDS:
        mine = (rows.kind == kind) & (rows.stage == 1)
        if mine.any():
            found[kind.name] = round(float(np.mean((timeline.end - timeline.start)[mine])), 3)
    return found | {"span": round(timeline.makespan, 2)}


# --- auto --------------------------------------------------------------------------------------


def choices(rank: int, count: int, backend: str, seconds: float, output: str) -> None:
    """All named schedules with both kinds of cuts, and auto's choice, in turns."""
    device = torch.empty(0, device="cuda" if backend == "nccl" else "cpu").device
    mesh = init_device_mesh(device.type, (count,), mesh_dim_names=("pp",))
    sizes = {"width": 1024, "layers": 12, "words": 65_536, "length": 512}
    if backend == "gloo":
        sizes = {"width": 64, "layers": 8, "words": 500, "length": 16}
    m, texts = 8, 2
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(sizes["words"], (texts * m, sizes["length"] + 1), generator=generator)
    text = text.to(device)
    batch, target = text[:, :-1], text[:, 1:].contiguous()
    usual: dict[str, Any] = {
        "example": (batch[:texts],),
        "microbatches": m,
        "loss_fn": surprise,
        "mesh": mesh,
    } | {"device": device}
    torch.manual_seed(0)
    model = GPT(**sizes)
    seen: dict[str, Any] = {}
    original = auto.tried

    def spied(found: Any, time: Any, ranks: Any, also: str) -> Any:
        known = inspect.getclosurevars(time).nonlocals
        seen.update(found=list(found), starts=known["starts"], batches=known["batches"])
        seen["result"] = original(found, time, ranks, also)
        return seen["result"]

    auto.tried = spied  # pyright: ignore
    begin = time.perf_counter()
    fresh = copy.deepcopy(model)
    pipes: dict[str, tl.Pipeline] = {
        "auto": tl.Pipeline(fresh, schedule="auto", example_target=target[:texts], **usual)
    }
    auto.tried = original
    ranks, built = pipes["auto"]._built.ranks, time.perf_counter()
    say(rank, f"{pipes['auto']._built.choice}\nchosen in {built - begin:.1f} s")
    say(rank, "all candidates: name, placement, bounds, predicted, measured")
    for each in seen["result"]:
        last = "" if each.measured is None else f"{each.measured:.1f}"
        say(
            rank,
            f"  {each.plan.name:24}{each.plan.placement.shape:22}{each.bounds} "
            f"{each.time:.1f} {last}",
        )
    took: dict[str, list[float]] = {}
    begin = built  # the rest has its own limit

    def late(limit: float) -> bool:
        mine = [time.perf_counter() - begin > limit]
        return any(each for (each,) in ranks.transport.exchange(mine, "whether it is late"))

    def turns(steps: dict[str, Callable[[], object]], number: int, limit: float) -> None:
        for turn in range(number):
            for name, step in steps.items():
                took.setdefault(name, []).append(waited(step, ranks))
            if turn >= 2 and late(limit):
                break

    def step_of(pipe: tl.Pipeline) -> Callable[[], object]:
        return lambda: pipe.step(batch, target=target)

    with section(rank, "named schedules, counted cuts"):
        for name in names():
            if name != "forward_only" and not late(seconds * 0.35):
                try:
                    pipes[name] = tl.Pipeline(copy.deepcopy(model), schedule=name, **usual)
                except tl.TaktlineError as error:
                    say(rank, f"{name}: {error}")
        say(rank, f"{len(pipes)} pipelines after {time.perf_counter() - begin:.1f} s")
        turns({name: step_of(pipe) for name, pipe in pipes.items()}, 4, seconds * 0.5)
    middle = {name: median(each[1:]) for name, each in took.items()}
    order = sorted(middle, key=lambda name: middle[name])
    # All ranks go on with those of rank 0.
    shared = ranks.transport.exchange([list(pipes).index(n) for n in order], "the order")
    order = [list(pipes)[at] for at in shared[0]]
    best = next((name for name in order if name != "auto"), "auto")
    table(rank, took, pipes)
    steps = {name: step_of(pipes[name]) for name in order if name in (*order[:4], "auto")}
    for name in pipes:
        if name not in steps:
            pipes[name] = None  # pyright: ignore
    gc.collect()
    cuts = {each.plan.placement: each.bounds for each in seen["found"]}
    with section(rank, "the best of them again, with measured cuts"):
        for name in [n for n in order if n != "auto"][:3]:
            pipe = pipes[name]
            if pipe is None or pipe.plan.placement not in cuts or late(seconds * 0.6):
                continue
            bounds = cuts[pipe.plan.placement]
            at = [seen["starts"][m][place] for place in bounds[1:-1]]
            again = tl.Pipeline(copy.deepcopy(model), schedule=pipe.plan, cuts=at, **usual)
            pipes[f"{name}, measured cuts"] = again
            steps[f"{name}, measured cuts"] = step_of(again)
    with ExitStack() as stack:
        with section(rank, "as auto tries them: its choice, and the best named one"):
            wanted = {"auto": (pipes["auto"].plan, seen["result"][0].bounds)}
            plan = pipes[best].plan
            if plan.placement in cuts:
                wanted[best] = plan, cuts[plan.placement]
            for name, (plan, bounds) in wanted.items():
                given = SimpleNamespace(
                    model=copy.deepcopy(model), example=usual["example"], prepare=None
                )
                at = [seen["starts"][m][place] for place in bounds[1:-1]]
                made = copies(given, auto._stages(given, at), plan.placement, ranks)
                kept = scheduled(made, plan, ranks, seen["batches"][m])
                steps[f"{name}, as tried"] = stack.enter_context(kept)[1]
        took.clear()
        gc.collect()
        gc.disable()
        with section(rank, "20 turns"):
            turns(steps, 21, seconds)
            table(rank, took, pipes)
            say(rank, "all ms:", {n: [round(x, 1) for x in each] for n, each in took.items()})
    with section(rank, "traced: the choice, and the best named one"):
        saved: dict[str, list[Timeline]] = {}
        for name in ("auto", best):
            with pipes[name].trace() as trace:
                for _ in range(2):
                    pipes[name].step(batch, target=target)
            say(rank, name)
            kinds_of(rank, trace.timelines, 1.0)
            saved[name] = trace.timelines
        keep(rank, output, "auto", saved, took, None)


def table(rank: int, took: dict[str, list[float]], pipes: dict[str, Any]) -> None:
    """Medians and quartiles; the first step of each warms it up."""
    if rank:
        return
    steps = {name: each[1:] for name, each in took.items()}
    for name, each in sorted(steps.items(), key=lambda pair: median(pair[1])):
        low, middle, high = np.quantile(each, [0.25, 0.5, 0.75])
        pipe = pipes.get(name)
        said = f"{pipe.plan.name}, {pipe.plan.placement}" if pipe is not None else ""
        print(f"{name:34}{middle:9.2f}{low:9.1f}{high:8.1f} {len(each):3}  {said}", flush=True)


# --- all ---------------------------------------------------------------------------------------

PARTS: dict[str, Callable[..., None]] = {
    "schedules": schedules,
    "small": small,
    "auto": choices,
    "two": schedules,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--parts", default="schedules,small,auto")
    parser.add_argument("--output", default="", help="a folder for what was measured")
    parser.add_argument("--part", help="run this one here")
    given = parser.parse_args()
    if given.part:
        ranks = 2 if given.part == "two" else given.ranks
        seconds = {"schedules": 35.0, "small": 30.0, "auto": 95.0, "two": 15.0}[given.part]
        args = given.backend, seconds, given.output
        run_ranks(PARTS[given.part], ranks, *args, backend=given.backend)
        return
    begin = time.perf_counter()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores", flush=True)
    if given.backend == "nccl":
        print(torch.cuda.get_device_name(), flush=True)
    for part in given.parts.split(","):
        print(f"\n===== {part} ({time.perf_counter() - begin:.0f} s so far)", flush=True)
        environment = os.environ | (
            {"TAKTLINE_DIAGNOSE_TINY": "1"} if given.backend == "gloo" else {}
        )
        command = [sys.executable, "-u", *sys.argv, "--part", part]
        child = subprocess.Popen(command, env=environment, process_group=0)
        try:
            child.wait(LIMITS[part] * (4 if given.backend == "gloo" else 1))
        except subprocess.TimeoutExpired:
            print(f"{part}: ended after {LIMITS[part]} s", flush=True)
        with_children(child)
    print(f"\nall parts took {time.perf_counter() - begin:.0f} s", flush=True)


def with_children(child: subprocess.Popen[bytes]) -> None:
    """End the processes of a part, which are a group of their own."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


if __name__ == "__main__":
    main()
