"""What the smallest pieces of a model cost on their ranks, found in traced steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from taktline.plan.action import Action, Kind
from taktline.plan.costs import Costs, Link
from taktline.plan.plan import Placement, Plan
from taktline.plan.registry import find
from taktline.plan.rows import FloatArray, Rows, known_medians
from taktline.plan.sharing import work
from taktline.plan.timeline import Timeline

_F, _B, _I, _W = KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
_LARGE = 2**16
"""From so many bytes on, a message takes its time by its size, and holds up the next one."""


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """The costs of units: the layers of a model, or stages, in its order.

    >>> units = Units(np.array([[1.0] * 4, [2.0] * 4, [1.0] * 4, [1.0] * 4]))
    >>> units.costs((0, 3, 4), Placement.linear(2)).forward
    (3.0, 1.0)
    """

    times: FloatArray
    """Of F, B, I and W, a row each."""
    sizes: FloatArray = field(default_factory=lambda: np.zeros((3, 1)))
    """Bytes: what a forward keeps for its backward, what a unit holds all the time (weights,
    gradients, optimizer state), and what goes to the next unit."""
    overhead: tuple[float, ...] = (0.0,) * len(KINDS)
    """What an action costs beside its work: saved for each two units in one stage."""
    send: float = 0.0
    """How long a message keeps the rank that sends it."""
    flight: float = 0.0
    """From when a message could leave until it has arrived."""
    cores: float = math.inf
    """How many ranks can compute at a time without slowing each other."""
    unit: str = ""

    def __len__(self) -> int:
        return self.times.shape[1]

    def held(self, bounds: Sequence[int]) -> FloatArray:
        """For each stage the bytes that a forward keeps for its backward, and that it holds."""
        sizes = np.broadcast_to(self.sizes, (3, len(self)))
        return np.add.reduceat(sizes[:2], bounds[:-1], axis=1)

    def costs(self, bounds: Sequence[int], placement: Placement) -> Costs:
        """The costs of stages: units ``bounds[s]`` up to ``bounds[s + 1]`` in stage s."""
        sums = np.add.reduceat(self.times, bounds[:-1], axis=1)
        times = sums - np.outer(self.overhead, np.diff(bounds) - 1)
        times = np.maximum(times, sums / 2)
        away = np.diff(placement.rank_of) != 0
        sent = self.send * np.array([np.append(away, False), np.append(False, away)])
        times[_F] += sent[0]
        times[[_B, _I]] += sent[1]
        sizes = np.broadcast_to(self.sizes[2], len(self))[np.array(bounds[1:]) - 1]
        flight, size = max(0.0, self.flight - self.send), float(np.median(sizes))
        occupies = size >= _LARGE and flight > 0
        forward, backward, inputs, weights = (tuple(row) for row in times.tolist())
        return Costs(
            forward=forward,
            backward=backward,
            backward_input=inputs,
            backward_weight=weights,
            link=Link(bandwidth=size / flight) if occupies else Link(latency=flight),
            message_bytes=tuple(sizes.tolist()) if occupies else 0.0,
            activation=tuple(self.held(bounds)[0].tolist()),
            unit=self.unit,
        )


def contiguous(ranks: int, bounds: Sequence[int], microbatches: int) -> Plan:
    """1F1B in which the stage of a rank is several units, each an action of its own.

    >>> print(*contiguous(2, (0, 1, 3), 1)[1])
    1F0 2F0 2B0 1B0
    """
    plan = find("1f1b").build(ranks, microbatches)
    rows: list[Rows] = []
    for rank in range(ranks):
        mine, units = plan.rows_of(rank), np.arange(bounds[rank], bounds[rank + 1])
        places = [units if kind == _F else units[::-1] for kind in mine.kind]
        each = len(units)
        numbers = np.repeat(mine.microbatch, each)
        rows.append(Rows.of(np.repeat(mine.kind, each), np.concatenate(places), numbers))
    rank_of = np.repeat(np.arange(ranks), np.diff(bounds))
    return Plan(rows, Placement.custom(rank_of.tolist(), ranks), microbatches, name="1f1b")


def one_by_one(placement: Placement, microbatches: int) -> Plan:
    """Each micro-batch after the one before, so that one rank computes at a time.

    The backward of every other one is split.

    >>> print(*one_by_one(Placement.v(2), 2)[0])
    0F0 3F0 3B0 0B0 0F1 3F1 3I1 3W1 0I1 0W1
    """
    rows: list[Rows] = []
    for rank in range(placement.ranks):
        own = placement.stages_of(rank)
        actions = [
            Action(stage, kind, m)
            for m in range(microbatches)
            for kinds, stages in (([_F], own), ([_I, _W] if m % 2 else [_B], own[::-1]))
            for stage in stages
            for kind in kinds
        ]
        rows.append(Rows.from_actions(actions))
    return Plan(rows, placement, microbatches, name="one_by_one")


def measured(
    alone: Sequence[Timeline], together: Sequence[Timeline], *, local: bool = False
) -> Units:
    """The costs of the stages in timelines of some steps.

    ``alone`` has steps of :func:`one_by_one`, and ``together`` steps in which the ranks compute at
    the same time. If actions take longer there, the ranks share cores. ``local`` ranks run in one
    thread, so only their actions count.
    """
    single = _of_steps(alone, math.inf, local)
    cores = math.inf if local else _cores(single, together)
    times = _of_steps(together, cores, local)
    # What was measured alone only is as much slower as the other backwards of its stage.
    pace = np.nanmean((times / np.maximum(single, 1e-9))[[_B, _I, _W]], axis=0)
    times = np.where(np.isnan(times), single * pace, times)
    units = Units(times, cores=cores, unit=together[0].costs.unit)
    if local:
        return units
    sends, flights = zip(*(_messages(each, cores) for each in together), strict=True)
    return replace(units, send=float(np.median(sends)), flight=float(np.median(flights)))


def _of_steps(timelines: Sequence[Timeline], cores: float, local: bool) -> FloatArray:
    """A row for each kind with the cost at each stage: its mean in a step, the median of steps."""
    tables: list[FloatArray] = []
    for each in timelines:
        rows, stages = each.plan.rows, each.plan.stages
        spent = each.end - each.start if local else work(each, cores)
        computes = rows.kind <= Kind.W
        place = (rows.kind.astype(int) * stages + rows.stage)[computes]
        total, count = (
            np.bincount(place, part, minlength=4 * stages) for part in (spent[computes], None)
        )
        with np.errstate(invalid="ignore"):
            tables.append((total / count).reshape(4, stages))
    return known_medians(np.stack(tables), axis=0)


def _cores(single: FloatArray, together: Sequence[Timeline]) -> float:
    """With how many cores all actions have as much work together as alone; inf if no rank waits."""

    def slower(cores: float) -> float:
        times = _of_steps(together, cores, local=False)
        both = ~np.isnan(times) & ~np.isnan(single)
        return float(times[both].sum() / max(single[both].sum(), 1e-9))

    if slower(math.inf) < _SLOWER:
        return math.inf
    low, high = 1.0, float(together[0].plan.ranks)
    if slower(low) > 1:
        return low
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if slower(middle) > 1 else (middle, high)
    return low


_SLOWER = 1.1
"""By how much actions must be slower together than alone, or it is noise."""


def _messages(timeline: Timeline, cores: float) -> tuple[float, float]:
    """How long a message keeps its sender, and how long it travels."""
    kind = timeline.plan.rows.kind
    sends = np.isin(kind, (Kind.SEND_F, Kind.SEND_B))
    if not sends.any():
        return 0.0, 0.0
    costs = Costs.from_timeline(timeline)
    return float(np.median(work(timeline, cores)[sends])), costs.link.latency


def with_overhead(units: Units, whole: Sequence[Timeline], bounds: Sequence[int]) -> Units:
    """The same with what an action costs, found in steps whose stages are several units each."""
    spare = len(units) + 1 - len(bounds)
    if not spare:
        return units
    more = units.times.sum(1) - _of_steps(whole, units.cores, local=False).sum(1)
    forward, backward = np.maximum(more[[_F, _B]] / spare, 0.0).tolist()
    # The halves of a backward share what it costs to begin them.
    each = (forward, backward, backward / 2, backward / 2)
    return replace(units, overhead=each)
