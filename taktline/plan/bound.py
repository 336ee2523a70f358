"""What no plan can beat: lower bounds on the time of a step, from arguments that each hold alone.

All of them are sums of fractions, so nothing is lost by rounding, and follow from these facts:

- A rank computes all of its work, once its first micro-batch has come.
- Before its first backward, the micro-batch must have been to the last stage and back; meanwhile
  memory holds only so many forwards. The same holds after the last forward.
- Before the last forward of a rank, all W must have run whose memory it needs. Then the gradient
  still has to reach stage 0.
- A micro-batch keeps its memory from F to W. All of them together take an area, which must fit
  into the rank's memory for the rank's time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from taktline.plan.costs import Costs
from taktline.plan.work import MARGIN, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least time of a step, whatever the plan.

    >>> from taktline.plan import bound
    >>> found = bound(Costs(), ranks=4, microbatches=8, memory=4)
    >>> found.span, found.proven
    (27.0, 'rank 0: wait for the first backward')
    """

    makespan: float
    """From time 0 to the end of the last action."""
    span: float
    """From the first action of a rank to its last, on the rank for which this is longest."""
    bubble: float
    """The share of the span in which an average rank is idle."""
    bubble_of_makespan: float
    """The share of the makespan in which an average rank is idle."""
    proven: str
    """The rank and the argument by which no span is shorter."""


def lower_bound(work: Work, costs: Costs) -> Bound:
    """The best of all arguments, on all ranks."""
    stages = _Stages(work, costs)
    ranks = [_Rank(stages, rank, limit) for rank, limit in enumerate(work.memory)]
    spans: list[tuple[Fraction, str]] = []
    makespan = Fraction(0)
    for rank in ranks:
        if rank.stages:
            found = list(rank.spans())
            makespan = max([makespan, *(rank.head + span for span, _ in found)])
            # The rank of stage 0 begins at 0, and ends no earlier than what it waits for at last.
            found.append((rank.end(), "the gradient's way back"))
            spans += [(span, f"rank {rank.rank}: {how}") for span, how in found]
    span, how = max(spans, key=lambda each: each[0])
    makespan = max(span, makespan)
    busy = stages.largest_work / work.placement.ranks
    return Bound(
        makespan=float(makespan / stages.scale),
        span=float(span / stages.scale),
        bubble=_bubble(busy, span),
        bubble_of_makespan=_bubble(busy, makespan),
        proven=how,
    )


def _bubble(busy: Fraction, cost: Fraction) -> float:
    return float(max(Fraction(0), 1 - busy / cost)) if cost else 0.0


class _Stages:
    """The numbers of all stages, whole: times and memory are multiples of small units."""

    def __init__(self, work: Work, costs: Costs) -> None:
        stages = work.placement.stages
        columns = [costs.of(name, stages).tolist() for name in _TIMES]
        hops = [work.hop[kind::3] for kind in (0, 1)]
        blocked = [work.time[kind::3] for kind in (0, 1)]  # with sends, where these block
        self.scale, times = _whole([*columns, *hops, *blocked])
        parts = ("activation", "kept_for_weight")
        memory = [costs.keeps(work.placement, part).tolist() for part in parts]
        self.memory_scale, (self.whole, self.kept) = _whole(memory)
        forward, inputs, weights, full, pair, forth, back, *blocked = times
        each = [
            f + max(i + w, b) for f, i, w, b in zip(forward, inputs, weights, full, strict=True)
        ]
        # Of all ranks, with each backward as a B or as I and W, whatever takes longer.
        self.largest_work = Fraction(sum(each) * work.microbatches)
        self.microbatches = work.microbatches
        self.stages_of: list[list[int]] = [[] for _ in work.memory]
        for stage, rank in enumerate(work.placement.rank_of):
            self.stages_of[rank].append(stage)
        # F, I and W take at least this long in any plan, also within a B or a pair.
        self.forward, inputs = blocked
        if costs.overlap is not None:
            self.forward = [0] * stages
            full = [min(*pair, time) for time in full]
        self.inputs = [min(i, b) for i, b in zip(inputs, full, strict=True)]
        self.weights = [min(w, b - i) for w, b, i in zip(weights, full, self.inputs, strict=True)]
        # When F of each stage begins at the earliest; and from the end of its I to that of stage 0.
        self.down = _sums(self.forward, forth)
        self.up = _sums(self.inputs, [*back[1:], 0])


def _sums(times: list[int], hops: list[int]) -> list[int]:
    return list(accumulate((t + h for t, h in zip(times, hops, strict=True)), initial=0))


_TIMES = ("forward", "backward_input", "backward_weight", "backward", "overlap")


def _whole(columns: list[list[float]]) -> tuple[int, list[list[int]]]:
    """Numbers as multiples of one unit, and how many of it are one."""
    exact = [[Fraction(number) for number in column] for column in columns]
    scale = math.lcm(*(number.denominator for column in exact for number in column))
    return scale, [[int(number * scale) for number in column] for column in exact]


class _Rank:
    """The bounds of one rank."""

    def __init__(self, of: _Stages, rank: int, limit: float) -> None:
        self.rank, self.stages, self.microbatches = rank, of.stages_of[rank], of.microbatches
        self.forward, self.inputs, self.weights = of.forward, of.inputs, of.weights
        self.whole, self.kept, self.down, self.up = of.whole, of.kept, of.down, of.up
        self.memory = self.microbatches * sum(self.whole[stage] for stage in self.stages)
        if math.isfinite(limit):
            fits = Fraction(limit) * Fraction(1 + MARGIN) * of.memory_scale
            self.memory = min(self.memory, int(fits))

    @property
    def head(self) -> int:
        """When the rank begins at the earliest."""
        return self.down[self.stages[0]]

    def spans(self) -> Iterator[tuple[Fraction, str]]:
        """Lower bounds on the rank's own span, each with its reason."""
        work = self._work()
        yield Fraction(work), "its work"
        start, end = self._waits_at_start(), self._waits_at_end()
        yield Fraction(work + start), "wait for the first backward"
        yield Fraction(work + end), "wait for the last backward"
        if self.microbatches > self._fit(self.stages[0]):
            # Something was released before the last forward, so it comes after the first backward.
            yield Fraction(work + start + end), "waits for the first and the last backward"
        yield self._area(), "memory over time"

    def end(self) -> Fraction:
        """When stage 0 has its last gradient at the earliest, and its W is done."""
        number = self.microbatches
        computed = sum(self.forward[s] + self.inputs[s] for s in self.stages) * number
        weights = number * sum(self.weights[stage] for stage in self.stages)
        before = max(Fraction(0), weights - self._weights_put_off())
        way = min(self.up[stage] for stage in self.stages)
        return self.head + computed + before + way + self.weights[0]

    def _work(self) -> int:
        return self.microbatches * self._each(self.stages)

    def _each(self, stages: list[int]) -> int:
        return sum(self.forward[s] + self.inputs[s] + self.weights[s] for s in stages)

    def _fit(self, stage: int) -> int:
        """How many micro-batches may be between F and the end of I of a stage."""
        whole = self.whole[stage]
        return min(self.microbatches, self.memory // whole) if whole else self.microbatches

    def _there_and_back(self, stage: int) -> int:
        """From the end of F of a stage to the start of its I."""
        last = len(self.forward) - 1
        down = self.down[last] + self.forward[last] - self.down[stage] - self.forward[stage]
        return down + self.up[last] + self.inputs[last] - self.up[stage] - self.inputs[stage]

    def _waits_at_start(self) -> int:
        """Idle between the first F and the first I of the rank's first stage."""
        first, *others = self.stages
        fit, time, memory = self._fit(first), self.forward[first], self.memory
        way = self._there_and_back(first)
        if not others:
            return max(0, way - (fit - 1) * time)
        # Until the second stage has its first F, whose memory must be free; and from then on.
        second = others[0]
        until = self.down[second] - self.down[first] - time
        early = self._fit_beside(first, second)
        waits = max(0, until - max(0, early - 1) * time)
        each = self._each(others)
        room = memory - fit * self.whole[first]
        through = fit if room >= min(self.whole[s] for s in others) else max(1, fit - 1)
        return waits + max(0, way - until - (fit - 1) * time - through * each)

    def _fit_beside(self, stage: int, other: int) -> int:
        """How many micro-batches may be in one stage while another begins one."""
        whole = self.whole[stage]
        if not whole:
            return self.microbatches
        return min(self.microbatches, (self.memory - self.whole[other]) // whole)

    def _waits_at_end(self) -> int:
        """Idle between the last F and its I, on a rank with one stage."""
        stage, *others = self.stages
        if others:
            return 0
        whole, kept, inputs = self.whole[stage], self.kept[stage], self.inputs[stage]
        weights, most = self.weights[stage], 0
        for both in range(self._fit(stage)):
            others_left, room = self.microbatches - 1 - both, self.memory - whole * (both + 1)
            alone = min(others_left, room // kept) if kept else others_left
            most = max(most, both * (inputs + weights) + alone * weights)
        return max(0, self._there_and_back(stage) - most)

    def _weights_put_off(self) -> Fraction:
        """The time of all W that can be left when the rank begins its last forward."""
        room = Fraction(self.memory - min(self.whole[stage] for stage in self.stages))
        total = Fraction(0)
        for stage in sorted(self.stages, key=self._memory_by_time):
            kept, weights = self.kept[stage], self.weights[stage]
            count = Fraction(self.microbatches)
            if kept:
                count = min(count, room / kept)
            room -= count * kept
            total += count * weights
        # The last forward's own, which memory holds already.
        return total + max(self.weights[stage] for stage in self.stages)

    def _memory_by_time(self, stage: int) -> Fraction:
        weights = self.weights[stage]  # those that take no time come last
        return Fraction(self.kept[stage], weights) if weights else Fraction(2) ** 4096

    def _area(self) -> Fraction:
        """Memory over time that all micro-batches take together, for the memory there is."""
        area = 0
        for stage in self.stages:
            forward, inputs = self.forward[stage], self.inputs[stage]
            held = forward + self._there_and_back(stage) + inputs
            area += self.whole[stage] * held + self.kept[stage] * self.weights[stage]
        return Fraction(self.microbatches * area, self.memory or 1)
