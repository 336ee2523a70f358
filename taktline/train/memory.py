"""``pipe.memory()``: what the stages keep for their backwards, predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from taktline.plan import Plan, peak_memory
from taktline.text import size_text, table
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
