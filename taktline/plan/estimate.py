"""What each rank holds while it trains: an estimate in bytes, from what its stages are.

Of a rank: the weights, gradients and optimizer state of its stages, the activations of the
micro-batches that its plan has in flight, messages, and what a forward or backward needs for a
moment. Not in it: what a device and its libraries take for themselves (0.5 to 1.5 GiB of a GPU).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from taktline.checks import check, refuse
from taktline.errors import MismatchError
from taktline.plan.action import Kind
from taktline.plan.costs import Costs
from taktline.plan.memory import peak_memory
from taktline.plan.plan import Plan
from taktline.plan.rows import FloatArray
from taktline.text import size_in, size_text, table

_UNDER_WAY = 2
"""Messages of a kind at each end of a boundary: one that is used, and the next one."""
AT_ONCE = 2
"""Of how many stages of a rank the streamed weights are on the device: one computes, one comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimit:
    """What a rank may use: bytes of memory, and its speed beside the other ranks.

    >>> RankLimit.read([{"memory": "16GiB"}, {"memory": 24e9, "speed": 1.4}])[1]
    RankLimit(memory=24000000000.0, speed=1.4)
    """

    memory: float = math.inf
    speed: float = 1.0

    @classmethod
    def read(cls, given: Sequence[Any]) -> list[RankLimit]:
        """Those of a list of dicts, one for each rank."""
        takes, found = 'a dict such as {"memory": "16GiB", "speed": 1.4}', list[RankLimit]()
        for rank, each in enumerate(given):
            has: Any = each
            if not isinstance(each, dict) or not {*has} <= {"memory", "speed"}:
                refuse(f"ranks[{rank}]", takes, has, MismatchError)
            memory: Any = has.get("memory", math.inf)
            memory = size_in(memory) or memory if isinstance(memory, str) else memory
            if memory != math.inf:
                what = f"the memory of rank {rank}, in bytes or as a text like 16GiB,"
                memory = check(what, memory, float, least=1, error=MismatchError)
            what = f"the speed of rank {rank}"
            speed = check(what, has.get("speed", 1.0), float, least=1e-6, error=MismatchError)
            found.append(cls(memory=memory, speed=speed))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """What a stage takes, with one micro-batch; or a rank, at its peak."""

    weights: float
    """Parameters and buffers, frozen ones too."""
    gradients: float
    optimizer: float
    """The state of the optimizer."""
    activations: float
    """What forwards keep for their backwards."""
    messages: float
    """Of a stage, what goes to the next one; its gradient is as large."""
    working: float = 0.0
    """What a forward or backward needs for a moment, beside what it keeps."""
    updating: float = 0.0
    """The same of a step of the optimizer, when no activations are kept."""
    streamed: float = 0.0
    """Of a stage, weights that come from the host while it computes; the weights of a rank include
     its largest ones."""

    @property
    def held(self) -> float:
        """What it takes all the time."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All of it, at the moment when it is most."""
        return self.held + max(self.activations + self.messages + self.working, self.updating)


def in_flight(plan: Plan) -> list[FloatArray]:
    """For each rank, how many micro-batches its stages have in flight, a row for each such state.

    >>> from taktline.plan import build
    >>> in_flight(build("1f1b", ranks=2, microbatches=8))[0].tolist()
    [[1.0], [2.0]]
    """
    trains, found = plan.has(Kind.B, Kind.I, Kind.W), list[FloatArray]()
    for rank in range(plan.ranks):
        rows, stages = plan.rows_of(rank), np.array(plan.placement.stages_of(rank))
        own = rows.stage[:, None] == stages
        taken = own & (rows.kind == Kind.F)[:, None]
        ends = np.isin(rows.kind, (Kind.B, Kind.W) if trains else (Kind.F,))
        released = (own & ends[:, None]).astype(float)
        live = np.cumsum(taken - released, axis=0) + released
        found.append(np.unique(live, axis=0))
    return found


def boundary_messages(plan: Plan, sends: Sequence[float]) -> FloatArray:
    """The bytes of messages on each rank: activations and gradients at each boundary to another."""
    found, rank_of = np.zeros(plan.ranks), plan.placement.rank_of
    for stage in range(plan.stages - 1):
        here, there = rank_of[stage], rank_of[stage + 1]
        if here != there:
            found[[here, there]] += 2 * _UNDER_WAY * sends[stage]
    return found


def estimate(plan: Plan, stages: Sequence[Bytes]) -> list[Bytes]:
    """What each rank of a plan holds.

    >>> from taktline.plan import build
    >>> stage = Bytes(weights=100, gradients=100, optimizer=200, activations=30, messages=5)
    >>> [rank.total for rank in estimate(build("1f1b", ranks=2, microbatches=4), [stage] * 2)]
    [480.0, 450.0]
    """
    messages = boundary_messages(plan, [stage.messages for stage in stages])
    peaks = peak_memory(plan, Costs(activation=tuple(stage.activations for stage in stages)))
    found: list[Bytes] = []
    for rank in range(plan.ranks):
        own = [stages[stage] for stage in plan.placement.stages_of(rank)]
        summed = (*PARTS[:3], "updating")
        held = {name: float(sum(getattr(s, name) for s in own)) for name in summed}
        held["weights"] += sum(sorted(stage.streamed for stage in own)[-AT_ONCE:])
        working = max((stage.working for stage in own), default=0.0)
        known = {"activations": float(peaks[rank]), "messages": float(messages[rank])}
        found.append(Bytes(**held, **known, working=working))
    return found


PARTS = tuple(field.name for field in fields(Bytes) if field.name != "streamed")
"""What a rank holds."""


def memory_table(found: Sequence[Bytes], limits: Sequence[RankLimit]) -> str:
    """What each rank holds, and what is left of its memory."""
    rare = [name for name in PARTS[5:] if not any(getattr(each, name) for each in found)]
    parts = [name for name in PARTS if name not in rare]
    lines = [["rank", *parts, "total", "memory", "left"]]
    for rank, (each, limit) in enumerate(zip(found, limits, strict=True)):
        left = limit.memory - each.total
        short = "-" * (left < 0) + size_text(abs(left))
        known = ["", ""] if limit.memory == math.inf else [size_text(limit.memory), short]
        numbers = [*(getattr(each, name) for name in parts), each.total]
        lines.append([f"{rank}", *map(size_text, numbers), *known])
    return table(lines)
