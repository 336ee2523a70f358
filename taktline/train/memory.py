"""``pipe.memory()``: what ranks hold, and stages keep; and plans within a limit of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.checks import check
from taktline.errors import ScheduleError
from taktline.plan import Costs, Plan, fit_memory, peak_memory
from taktline.plan.estimate import Bytes, RankLimit, estimate, memory_table
from taktline.plan.fit import least_memory
from taktline.plan.io import from_json, to_json
from taktline.runtime.introduction import BUILDING
from taktline.stage.names import unwrapped
from taktline.text import size_text, table
from taktline.train.auto import limits_of
from taktline.train.moments import measure_alone
from taktline.train.rank_limits import MakeOptimizer, held_by_ranks, stage_bytes
from taktline.train.ranks import Ranks
from taktline.train.stage_table import NOTHING, StageTable
from taktline.train.trial import speeds, training_loss
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
    """What all stages keep for their backwards, by their numbers; ``ranks`` is all that ranks hold.

    >>> import taktline as tl
    >>> stages = [torch.nn.Linear(4, 4), torch.nn.Tanh()]
    >>> pipe = tl.Pipeline(stages, example=(torch.ones(2, 4),), microbatches=4, ranks=2)
    >>> print(pipe.memory())
    rank  weights  gradients  optimizer  activations  messages  working  total
       0     80 B       80 B      168 B         64 B     128 B    112 B  632 B
       1      0 B        0 B        0 B         32 B     128 B     68 B  228 B
    <BLANKLINE>
    rank  stage  keeps  device
       0      0   32 B    64 B
       1      1   32 B    32 B
    keeps, copied: one micro-batch; device, host: peaks by the plan; measured: that of the host
    """

    ranks: list[Bytes]
    """What each rank holds in training, at its peak."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[Bytes],
        found: Mapping[int, Sequence[int]],
        peaks: list[int],
    ) -> None:
        """``found`` has the measured sizes; ``peaks`` what torch allocated in each process."""
        super().__init__()
        self._rank_of, self._peaks = plan.placement.rank_of, peaks
        self.ranks = estimate(plan, stages)
        for stage, rank in enumerate(self._rank_of):
            keeps = stages[stage].activations
            only = Costs(activation=tuple(keeps * (each == stage) for each in range(plan.stages)))
            device, host = (float(peak_memory(plan, only, host=x)[rank]) for x in (False, True))
            copied, measured = found[stage]
            self[stage] = StageMemory(float(keeps), copied, device, host, measured)

    def __str__(self) -> str:
        lines = [["rank", "stage", *StageMemory._fields]]
        for stage in sorted(self, key=lambda stage: (self._rank_of[stage], stage)):
            sizes = [size_text(size) if size else "" for size in self[stage]]
            lines.append([str(self._rank_of[stage]), str(stage), *sizes])
        whole = memory_table(self.ranks, [RankLimit()] * len(self.ranks))
        notes = "keeps, copied: one micro-batch; device, host: peaks by the plan; measured: that "
        text = f"{whole}\n\n{table(lines)}\n{notes}of the host"
        for process, peak in enumerate(self._peaks):
            text += f"\nprocess {process}: {size_text(peak)} at most, by torch" * bool(peak)
        return text


def memory_of(built: Any, optimizer: torch.optim.Optimizer | None) -> Memory:
    """The memory of a pipeline; all ranks take part."""
    device, stages = built.ranks.device, built.schedule._stages
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    make, needs = _maker(optimizer), built.table.needs or [NOTHING] * built.plan.stages
    mine: list[tuple[list[int], list[float]]] = []
    for each in stages:
        number, given = each.stage_index, needs[each.stage_index].given
        module, loss = built.model.modules[number], None
        if number == built.plan.stages - 1:
            loss = training_loss(built.options["loss_fn"], has_target=built.target is not None)
        moment = measure_alone(unwrapped(module), number, given, loss, built.target)
        streams = number in built.streams
        (taken,) = stage_bytes([module], [needs[number]], make, [moment], streams=streams)
        mine.append(([number, each.copied, each.most_on_host], [*map(float, astuple(taken))]))
    shape = (int, [([int], [float])])
    call = "memory()"
    shared = share_values(built.ranks.transport, [peak, mine], shape, call, what="the memory")
    rows = [row for _, process in shared for row in process]
    found = {stage: sizes for (stage, *sizes), _ in rows}
    names = [field.name for field in fields(Bytes)]
    takes = {stage: dict(zip(names, taken, strict=True)) for (stage, *_), taken in rows}
    ordered = [Bytes(**takes[stage]) for stage in range(built.plan.stages)]
    return Memory(built.plan, ordered, found, [peak for peak, _ in shared])


def _maker(optimizer: torch.optim.Optimizer | None) -> MakeOptimizer:
    """Makes optimizers like this one; AdamW if there is none."""
    if optimizer is None:
        return torch.optim.AdamW
    check("optimizer", optimizer, torch.optim.Optimizer, "an optimizer of torch")
    kind: Any = type(optimizer)
    known = inspect.signature(kind.__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    return lambda parameters: kind(parameters, **options)


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
