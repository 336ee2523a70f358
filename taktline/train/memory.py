"""``pipe.memory()``: what the stages keep for their backwards, predicted and measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from taktline.errors import ScheduleError
from taktline.plan import Plan, fit_memory, peak_memory
from taktline.plan.candidates import TRAINING
from taktline.stage.offload import copies_on
from taktline.text import size_text, table
from taktline.train.auto import limits_of
from taktline.train.stage_table import StageTable
from taktline.train.trial import weights_of
from taktline.transport.exchange import share_values


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What one stage keeps, in bytes."""

    keeps: int | None
    """For one micro-batch, counted; None if that is not known."""
    copied: int
    """Of one micro-batch, to the host: measured."""
    device: float | None
    """The peak on the device, as the plan says."""
    host: float | None
    """The same of the host."""
    most_on_host: int
    """The same, measured."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What all stages keep for their backwards.

    >>> import taktline as tl
    >>> stages = [torch.nn.Linear(4, 4), torch.nn.Tanh()]
    >>> pipe = tl.Pipeline(stages, example=(torch.ones(2, 4),), microbatches=4, ranks=2)
    >>> print(pipe.memory())
    rank  stage  keeps  copied  device   host  measured
       0      0   32 B          64 B
       1      1   32 B          32 B
    keeps, copied: one micro-batch; device, host: the peak by the plan; measured: that of the host
    """

    plan: Plan
    stages: dict[int, StageMemory]
    peaks: list[int]
    """What torch has allocated at most in each process, in all its steps; 0 on the CPU."""

    def __str__(self) -> str:
        lines = [["rank", "stage", "keeps", "copied", "device", "host", "measured"]]
        for rank in range(self.plan.ranks):
            for place, stage in enumerate(self.plan.placement.stages_of(rank)):
                each = self.stages[stage]
                sizes = each.keeps, each.copied, each.device, each.host, each.most_on_host
                texts = [size_text(size) if size else "" for size in sizes]
                lines.append(["" if place else str(rank), str(stage), *texts])
        text = table(lines)
        text += "\nkeeps, copied: one micro-batch; device, host: the peak by the plan; measured: "
        text += "that of the host"
        for process, peak in enumerate(self.peaks):
            text += f"\nprocess {process}: {size_text(peak)} at most, by torch" * bool(peak)
        return text


def memory_of(built: Any) -> Memory:
    """The memory of a pipeline; all ranks take part."""
    plan, costs, needs = built.plan, built.table.work, built.table.needs
    device = built.ranks.device
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    mine = [[s.stage_index, s.copied, s.most_on_host] for s in built.schedule._stages]
    shared = share_values(
        built.ranks.transport,
        [peak, mine],
        (int, [(int, int, int)]),
        "memory()",
        what="the memory",
    )
    found = dict[int, StageMemory]()
    for _, stages in shared:
        for stage, copied, most in stages:
            device_bytes = host = None
            if costs is not None:
                only = [0.0] * plan.stages
                only[stage] = float(costs.of("activation", plan.stages)[stage])
                alone = replace(costs, activation=tuple(only))
                rank = plan.placement.rank_of[stage]
                device_bytes, host = (
                    float(peak_memory(plan, alone, host=on_host)[rank]) for on_host in (False, True)
                )
            keeps = None if needs is None else needs[stage].keeps
            found[stage] = StageMemory(
                keeps=keeps, copied=copied, device=device_bytes, host=host, most_on_host=most
            )
    return Memory(plan, found, [peak for peak, _ in shared])


def fitted(
    plan: Plan,
    stages: StageTable,
    modules: Mapping[int, nn.Module],
    memory: Any,
    device: torch.device,
) -> Plan:
    """The plan with what saves memory, so that each rank keeps within its own.

    The costs are counted: what is copied takes its bytes by the measured bandwidth of the device.
    """
    limits, costs, needs = limits_of(memory, plan.ranks), stages.work, stages.needs
    if costs is None or needs is None:
        raise ScheduleError(
            "memory= fits the plan to what stages keep, which is counted with an example: pass "
            "example=(…), the arguments of one micro-batch, and all stages; or leave out memory="
        )
    assert limits is not None
    room = list[float]()
    for rank, limit in enumerate(limits):
        held = TRAINING * sum(weights_of(modules[s]) for s in plan.placement.stages_of(rank))
        if held >= limit:
            raise ScheduleError(
                f"rank {rank} needs {size_text(held)} for its weights, their gradients and an "
                f"optimizer like Adam, which is not less than memory={size_text(limit)}; pass more "
                "memory, or start more ranks"
            )
        room.append(limit - held)
    operations, bandwidth = speeds(device)
    copies = tuple(operations * need.keeps / bandwidth for need in needs)
    arrives = (0, *(need.sends for need in needs[:-1]))
    kept = tuple(float(min(a, need.keeps)) for a, need in zip(arrives, needs, strict=True))
    more: Any = {"offload": copies, "recompute": costs.forward, "kept_for_recompute": kept}
    return fit_memory(plan, replace(costs, **more), room)


@cache
def speeds(device: torch.device) -> tuple[float, float]:
    """Counted operations, and copied bytes, of a device in a second."""
    is_cuda = device.type == "cuda"
    size, nbytes = (8192, 1 << 28) if is_cuda else (512, 1 << 24)
    dtype = torch.bfloat16 if is_cuda else torch.float32
    matrix, copies = torch.ones(size, size, dtype=dtype, device=device), copies_on(device)
    host, there = copies.take(nbytes), torch.empty(nbytes, dtype=torch.uint8, device=device)

    def seconds(call: Callable[[], object]) -> float:
        times: list[float] = []
        for _ in range(4):
            began = time.perf_counter()
            call()
            if is_cuda:
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        return min(times)

    product = seconds(lambda: matrix @ matrix)
    copy = seconds(lambda: copies.wait(copies.copy([(host, there)], inward=False)))
    copies.give([host])
    return 2 * size**3 / product, nbytes / copy
