"""``pipe.memory()``: what the stages keep for their backwards; and plans within a limit of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.errors import ScheduleError
from taktline.plan import Costs, Plan, fit_memory, peak_memory
from taktline.plan.io import from_json, to_json
from taktline.runtime.introduction import BUILDING
from taktline.stage.offload import copies_on
from taktline.text import size_text, table
from taktline.train.auto import limits_of
from taktline.train.rank_limits import held_by_ranks
from taktline.train.ranks import Ranks
from taktline.train.stage_table import StageTable
from taktline.transport.exchange import share_values


class StageMemory(NamedTuple):
    """What one stage keeps, in bytes; 0 if that is unknown."""

    keeps: float
    """For one micro-batch, counted."""
    copied: int
    """Of one micro-batch, to the host: measured."""
    device: float
    """The peak on the device, as the plan says."""
    host: float
    """The same of the host."""
    measured: int
    """The same of the host, measured."""


class Memory(dict[int, StageMemory]):
    """What all stages keep for their backwards, by their numbers.

    >>> import taktline as tl
    >>> stages = [torch.nn.Linear(4, 4), torch.nn.Tanh()]
    >>> pipe = tl.Pipeline(stages, example=(torch.ones(2, 4),), microbatches=4, ranks=2)
    >>> print(pipe.memory())
    rank  stage  keeps  device
       0      0   32 B    64 B
       1      1   32 B    32 B
    keeps, copied: one micro-batch; device, host: peaks by the plan; measured: that of the host
    """

    def __init__(
        self, plan: Plan, costs: Costs | None, found: Mapping[int, Sequence[int]], peaks: list[int]
    ) -> None:
        """``found`` has the measured sizes; ``peaks`` what torch allocated in each process."""
        super().__init__()
        self._rank_of, self._peaks = plan.placement.rank_of, peaks
        whole = costs.of("activation", plan.stages) if costs else [0.0] * plan.stages
        for stage, rank in enumerate(self._rank_of):
            only = tuple(keeps * (other == stage) for other, keeps in enumerate(whole))
            each = replace(costs or Costs(), activation=only)
            device, host = (float(peak_memory(plan, each, host=x)[rank]) for x in (False, True))
            copied, measured = found[stage]
            self[stage] = StageMemory(float(whole[stage]), copied, device, host, measured)

    def __str__(self) -> str:
        lines = [["rank", "stage", *StageMemory._fields]]
        for stage in sorted(self, key=lambda stage: (self._rank_of[stage], stage)):
            sizes = [size_text(size) if size else "" for size in self[stage]]
            lines.append([str(self._rank_of[stage]), str(stage), *sizes])
        notes = "keeps, copied: one micro-batch; device, host: peaks by the plan; measured: that "
        text = f"{table(lines)}\n{notes}of the host"
        for process, peak in enumerate(self._peaks):
            text += f"\nprocess {process}: {size_text(peak)} at most, by torch" * bool(peak)
        return text


def memory_of(built: Any) -> Memory:
    """The memory of a pipeline; all ranks take part."""
    device, stages = built.ranks.device, built.schedule._stages
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    mine = [[s.stage_index, s.copied, s.most_on_host] for s in stages]
    shape = (int, [(int, int, int)])
    call = "memory()"
    shared = share_values(built.ranks.transport, [peak, mine], shape, call, what="the memory")
    found = {stage: sizes for _, process in shared for stage, *sizes in process}
    return Memory(built.plan, built.table.work, found, [peak for peak, _ in shared])


def fitted(
    plan: Plan,
    stages: StageTable,
    modules: Mapping[int, nn.Module],
    memory: Any,
    ranks: Ranks,
    *,
    streams: bool,
) -> Plan:
    """The plan with what saves memory, so that each rank keeps within its own; on all ranks.

    The costs are counted, and the first process finds the plan, by the speed of its device.
    """

    def found() -> str:
        if ranks.processes.place:
            return ""
        limits, costs, needs = limits_of(memory, plan.ranks), stages.work, stages.needs
        if costs is None or needs is None:
            raise ScheduleError(
                "memory= fits the plan to what stages keep, which is counted with an example: pass "
                "example=(…), the arguments of one micro-batch, and all stages"
            )
        room = list[float]()
        all_held = held_by_ranks(plan, modules, streams=streams)
        for rank, (limit, held) in enumerate(zip(limits or (), all_held, strict=False)):
            if held >= limit:
                raise ScheduleError(
                    f"rank {rank} needs {size_text(held)} for its weights, their gradients and an "
                    f"optimizer like Adam, which is not less than memory={size_text(limit)}; pass "
                    "more memory, or start more ranks"
                )
            room.append(limit - held)
        operations, bandwidth = speeds(ranks.device)
        copies = tuple(operations * need.keeps / bandwidth for need in needs)
        arrives = (0, *(need.sends for need in needs))
        kept = tuple(float(min(a, n.keeps)) for a, n in zip(arrives, needs, strict=False))
        more: Any = {"offload": copies, "recompute": costs.forward, "kept_for_recompute": kept}
        return to_json(fit_memory(plan, replace(costs, **more), room))

    return from_json(ranks.processes.everywhere(found, "fit the plan", BUILDING)[0])


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
