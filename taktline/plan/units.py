"""What the smallest pieces of a model cost on their ranks, found in traced steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from taktline.plan.action import Action, Kind
from taktline.plan.costs import Costs
from taktline.plan.links import Link
from taktline.plan.plan import Placement, Plan
from taktline.plan.registry import find
from taktline.plan.rows import BoolArray, FloatArray, IntArray, Rows, known_medians
from taktline.plan.sharing import work
from taktline.plan.timeline import Timeline

_F, _B, _I, _W = range(4)  # the rows of tables
KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
_TABLE = np.full(len(Kind), len(KINDS))
_TABLE[[*KINDS]] = range(len(KINDS))
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
    spinning: bool = False
    """Whether a rank that waits slows the others like one that computes, until its step ends."""
    unit: str = ""
    bandwidth: float = 0.0
    """Bytes that a rank copies to its host in a unit of time; 0: it keeps all activations."""

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
        costs = Costs(
            forward=forward,
            backward=backward,
            backward_input=inputs,
            backward_weight=weights,
            link=Link(bandwidth=size / flight) if occupies else Link(latency=flight),
            message_bytes=tuple(sizes.tolist()) if occupies else 0.0,
            activation=tuple(self.held(bounds)[0].tolist()),
            unit=self.unit,
        )
        arrives = np.append(0.0, sizes[:-1])
        return costs.saving(arrives.tolist(), self.bandwidth) if self.bandwidth else costs


def contiguous(ranks: int, bounds: Sequence[int], microbatches: int) -> Plan:
    """1F1B in which the stage of a rank is several units, each an action of its own.

    >>> print(*contiguous(2, (0, 1, 3), 1)[1])
    1F0 2F0 2B0 1B0
    """
    plan = find("1f1b").build(ranks, microbatches)
    rows: list[Rows] = []
    for rank in range(ranks):
        mine, units = plan.rows_of(rank), np.arange(bounds[rank], bounds[rank + 1])
        places = [units if kind == Kind.F else units[::-1] for kind in mine.kind]
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
            for kinds, stages in ((KINDS[:1], own), (KINDS[2:] if m % 2 else KINDS[1:2], own[::-1]))
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
    the same time. If actions take longer there, the ranks share cores; if a rank alone is quicker
    once the others have ended, these spin while they wait. ``local`` ranks run in one thread, so
    only their actions count.
    """
    spinning = not local and _spins(alone)
    single = _of_steps(alone, math.inf, local)
    cores = math.inf if local or spinning else _cores(single, together)
    times = _of_steps(together, cores, local)
    if spinning:
        single, times = _in_turns(_beside_all(alone), _beside_all(together), together[0].plan.ranks)
    # What was measured alone only is as much slower as the other backwards of its stage.
    pace = np.nanmean((times / np.maximum(single, 1e-9))[[_B, _I, _W]], axis=0)
    times = np.where(np.isnan(times), single * pace, times)
    units = Units(times, cores=cores, spinning=spinning, unit=together[0].costs.unit)
    if local:
        return units
    sends, flights = zip(*(_messages(each, cores, spinning) for each in together), strict=True)
    return replace(units, send=float(np.median(sends)), flight=float(np.median(flights)))


def _spins(alone: Sequence[Timeline]) -> bool:
    """Whether the rank that ends last is much quicker once the others have ended.

    Its last backward is compared with that of the micro-batch two before, which is split, too.
    """
    plan, last = alone[0].plan, alone[0].plan.microbatches - 1
    rows, first = plan.rows, plan.rank_of_rows() == plan.placement.rank_of[0]
    halves = first & np.isin(rows.kind, (Kind.I, Kind.W))
    late, early = (halves & (rows.microbatch == m) for m in (last, last - 2))
    ratios = [spent[late].sum() / max(spent[early].sum(), 1e-9) for spent in map(work, alone)]
    return plan.ranks > 1 and float(np.median(ratios)) < _QUICKER


_QUICKER = 0.8
"""How much of its time an action takes, at most, on a GPU that others have left."""


def _in_turns(
    alone: Sequence[FloatArray], together: Sequence[FloatArray], ranks: float
) -> tuple[FloatArray, FloatArray]:
    """The costs alone and together, where ranks take turns on a GPU.

    An action with 1.6 ms of work takes 1.6 ms, or 8.6 where the turn of its rank ends on the way
    and the others have theirs. Which of both it is may be the same in all micro-batches of a plan,
    and different in another plan. So whole gaps are taken away, and all work is as much slower as
    it is in the mean of the steps in which the ranks run together.
    """
    gap, means = _gap(together), _means(together)
    if not gap:
        return _means(alone).reshape(4, -1), means.reshape(4, -1)
    slower, own = ranks, means
    for _ in range(5):
        own = _without_gaps(together, gap, slower)
        slower = float(np.nansum(means) / np.nansum(own))
    single = _without_gaps(alone, gap, slower)
    return slower * single.reshape(4, -1), slower * own.reshape(4, -1)


def _beside_all(timelines: Sequence[Timeline]) -> list[FloatArray]:
    """What each row of a kind and stage took beside all ranks, in the order of tables.

    Rows that ran when a rank had ended count where there are no others.
    """
    spent = np.concatenate([work(each, spinning=True) for each in timelines])
    place = np.concatenate([_places(each) for each in timelines])
    early = np.concatenate([_before_any_end(each) for each in timelines])
    found: list[FloatArray] = []
    for at in range(4 * timelines[0].plan.stages):
        here = place == at
        found.append(spent[here & early if (here & early).any() else here])
    return found


def _places(timeline: Timeline) -> IntArray:
    """The place of each row in a table of kinds and stages; beyond its end for other kinds."""
    rows = timeline.plan.rows
    return _TABLE[rows.kind] * timeline.plan.stages + rows.stage


def _before_any_end(timeline: Timeline) -> BoolArray:
    """Whether each row has ended before the first rank has."""
    by_rank = np.split(timeline.end, timeline.plan.offsets[1:-1])
    return timeline.end <= min(each.max(initial=0.0) for each in by_rank)


def _gap(spent: Sequence[FloatArray]) -> float:
    """By how much actions of a kind and stage most often differ; 0 if all are alike."""
    apart: list[FloatArray] = [np.zeros(0)]
    for each in filter(len, spent):
        sizes = np.abs(np.subtract.outer(each, each))
        apart.append(sizes[sizes > _ALIKE * each.mean()])
    sizes = np.sort(np.concatenate(apart))
    if not len(sizes):
        return 0.0
    first, last = (np.searchsorted(sizes, part * sizes) for part in (0.98, 1.02))
    most = int(np.argmax(last - first))
    return float(np.median(sizes[first[most] : last[most]]))


_ALIKE = 0.1
"""By how much times of the same action differ without a reason, as a part of their mean."""


def _means(spent: Sequence[FloatArray]) -> FloatArray:
    return np.array([each.mean() if len(each) else np.nan for each in spent])


def _without_gaps(spent: Sequence[FloatArray], gap: float, slower: float) -> FloatArray:
    """What actions have to do: their time without gaps, as many as the mean time says."""
    found: list[float] = []
    for each, mean in zip(spent, _means(spent).tolist(), strict=True):
        gaps = np.rint((each - mean / slower) / gap)
        rest = np.maximum(each - gaps * gap, 0.0)  # gaps vary, and leave less than nothing
        found.append(float(np.median(rest)) if len(each) else math.nan)
    return np.array(found)


def _of_steps(
    timelines: Sequence[Timeline], cores: float, local: bool, *, spinning: bool = False
) -> FloatArray:
    """A row for each kind with the cost at each stage: its mean in a step, the median of steps."""
    tables: list[FloatArray] = []
    for each in timelines:
        rows, stages = each.plan.rows, each.plan.stages
        spent = each.end - each.start if local else work(each, cores, spinning=spinning)
        computes = np.isin(rows.kind, KINDS)
        place = _places(each)[computes]
        total, count = (
            np.bincount(place, part, minlength=len(KINDS) * stages)
            for part in (spent[computes], None)
        )
        with np.errstate(invalid="ignore"):
            tables.append((total / count).reshape(-1, stages))
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


def _messages(timeline: Timeline, cores: float, spinning: bool) -> tuple[float, float]:
    """How long a message keeps its sender, and how long it travels."""
    kind = timeline.plan.rows.kind
    sends = np.isin(kind, (Kind.SEND_F, Kind.SEND_B))
    if not sends.any():
        return 0.0, 0.0
    costs = Costs.from_timeline(timeline)
    keeps = work(timeline, cores, spinning=spinning)[sends]
    return float(np.median(keeps)), costs.link.between(0, 1).latency


def with_overhead(units: Units, whole: Sequence[Timeline], bounds: Sequence[int]) -> Units:
    """The same with what an action costs, found in steps whose stages are several units each."""
    spare = len(units) + 1 - len(bounds)
    if not spare:
        return units
    steps = _of_steps(whole, units.cores, local=False, spinning=units.spinning)
    more = units.times.sum(1) - steps.sum(1)
    forward, backward = np.maximum(more[[_F, _B]] / spare, 0.0).tolist()
    # The halves of a backward share what it costs to begin them.
    each = (forward, backward, backward / 2, backward / 2)
    return replace(units, overhead=each)
