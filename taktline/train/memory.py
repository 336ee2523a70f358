"""``pipe.memory()``: what the stages keep for their backwards; and plans within a limit of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.errors import ScheduleError
from taktline.plan import Costs, Plan, fit_memory, peak_memory
from taktline.plan.fit import least_memory
from taktline.plan.io import from_json, to_json
from taktline.runtime.introduction import BUILDING
from taktline.text import size_text, table
from taktline.train.auto import limits_of
from taktline.train.rank_limits import held_by_ranks
from taktline.train.ranks import Ranks
from taktline.train.stage_table import StageTable
from taktline.train.trial import speeds
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
        operations, bandwidth = speeds(ranks.device)
        arrives = [0.0, *(float(need.sends) for need in needs[:-1])]
        costs = costs.saving(arrives, bandwidth / operations)
        held = held_by_ranks(plan, modules, streams=streams)
        least = least_memory(plan, costs).tolist()
        for rank, limit in enumerate(limits or ()):
            if held[rank] + least[rank] > limit:
                raise ScheduleError(
                    f"{plan.name} does not fit into memory={size_text(limit)}: rank {rank} needs "
                    f"{size_text(held[rank])} for its weights, their gradients and an optimizer "
                    f"like Adam, and at least {size_text(least[rank])} for activations; pass more "
                    "memory, make micro-batches smaller, or start more ranks"
                )
        room = [limit - each for limit, each in zip(limits or (), held, strict=True)]
        return to_json(fit_memory(plan, costs, room))

    return from_json(ranks.processes.everywhere(found, "fit the plan", BUILDING)[0])
