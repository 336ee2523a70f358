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
from taktline.plan.plan import Placement
from taktline.plan.work import MARGIN, Work

_NO = Fraction(0)
_MARGIN = Fraction(1 + MARGIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least time of a step, whatever the plan.

    >>> from taktline.plan import bound
    >>> found = bound(Costs(), ranks=4, microbatches=8, memory=4)
    >>> print(found)
    no plan is below makespan 27 or span 27 (bubble 11.1%)
    >>> found.proven
    'rank 0: wait for the first backward'
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

    def __str__(self) -> str:
        return (
            f"no plan is below makespan {self.makespan:.5g} or span {self.span:.5g} "
            f"(bubble {self.bubble:.1%})"
        )


def lower_bound(work: Work, costs: Costs) -> Bound:
    """The best of all arguments, on all ranks."""
    times = _shortest(work, costs)
    held = [rank for rank in range(work.placement.ranks) if rank in work.placement.rank_of]
    ranks = [_Rank(work, costs, rank, times) for rank in held]
    spans = [(span, f"rank {rank.rank}: {how}") for rank in ranks for span, how in rank.spans()]
    # The rank of stage 0 begins at 0, and ends no earlier than what it waits for in the end.
    ends = [(rank.end(), f"rank {rank.rank}: the gradient's way back") for rank in ranks]
    span, how = max([*spans, *ends], key=lambda each: each[0])
    makespans = [rank.head + each for rank in ranks for each, _ in rank.spans()]
    makespan = max([span, *makespans])
    busy = _largest_work(work, costs)
    return Bound(
        makespan=float(makespan),
        span=float(span),
        bubble=_bubble(busy, span),
        bubble_of_makespan=_bubble(busy, makespan),
        proven=how,
    )


def _bubble(busy: Fraction, cost: Fraction) -> float:
    return float(max(_NO, 1 - busy / cost)) if cost else 0.0


def _fractions(costs: Costs, name: str, placement: Placement) -> list[Fraction]:
    return [Fraction(number) for number in costs.of(name, placement.stages).tolist()]


def _largest_work(work: Work, costs: Costs) -> Fraction:
    """Of an average rank: a B may take more or less time than I and W."""
    names = ("forward", "backward_input", "backward_weight", "backward")
    columns = [_fractions(costs, name, work.placement) for name in names]
    each = [f + max(i + w, b) for f, i, w, b in zip(*columns, strict=True)]
    return sum(each, _NO) * work.microbatches / work.placement.ranks


def _shortest(work: Work, costs: Costs) -> list[list[Fraction]]:
    """F, I and W of each stage, no longer than any plan can have them: in a B or a pair, too."""
    names = ("forward", "backward_input", "backward_weight", "backward", "overlap")
    forward, inputs, weights, whole, pair = (
        _fractions(costs, name, work.placement) for name in names
    )
    if costs.comm_blocks:
        forward, inputs = ([Fraction(time) for time in work.time[kind::3]] for kind in (0, 1))
    if costs.overlap is not None:
        for rank in range(work.placement.ranks):
            stages = work.placement.stages_of(rank)
            least = min((pair[stage] for stage in stages), default=_NO)
            longest = max((whole[stage] for stage in stages), default=_NO)
            for stage in stages:
                forward[stage] = min(forward[stage], max(_NO, least - longest))
                inputs[stage] = min(inputs[stage], least)
                whole[stage] = min(whole[stage], least)
    inputs = [min(i, b) for i, b in zip(inputs, whole, strict=True)]
    rest = [min(w, b - i) for w, b, i in zip(weights, whole, inputs, strict=True)]
    return [forward, inputs, rest]


class _Rank:
    """The bounds of one rank."""

    def __init__(self, work: Work, costs: Costs, rank: int, times: list[list[Fraction]]) -> None:
        placement, self.rank, self.microbatches = work.placement, rank, work.microbatches
        self.stages = placement.stages_of(rank)
        self.forward, self.inputs, self.weights = times
        hops = [[Fraction(number) for number in work.hop[kind::3]] for kind in (0, 1)]
        self.down = _way(self.forward, hops[0])
        self.up = _way(self.inputs, [*hops[1][1:], _NO])
        self.whole = _fractions(costs, "activation", placement)
        self.kept = _fractions(costs, "kept_for_weight", placement)
        most = self.microbatches * sum((self.whole[stage] for stage in self.stages), _NO)
        limit = work.memory[rank]
        self.memory = min(most, Fraction(limit) * _MARGIN) if math.isfinite(limit) else most

    @property
    def head(self) -> Fraction:
        """When the rank begins at the earliest."""
        return self.down[self.stages[0]]

    def spans(self) -> Iterator[tuple[Fraction, str]]:
        """Lower bounds on the rank's own span, each with its reason."""
        work = self._work()
        yield work, "its work"
        start, end = self._waits_at_start(), self._waits_at_end()
        yield work + start, "wait for the first backward"
        yield work + end, "wait for the last backward"
        if self.microbatches > self._fit(self.stages[0]):
            # Something was released before the last forward, so it comes after the first backward.
            yield work + start + end, "waits for the first and the last backward"
        yield self._area(), "memory over time"

    def end(self) -> Fraction:
        """When stage 0 has its last gradient at the earliest, and its W is done."""
        number = self.microbatches
        computed = sum((self.forward[s] + self.inputs[s] for s in self.stages), _NO) * number
        weights = number * sum((self.weights[stage] for stage in self.stages), _NO)
        before = max(_NO, weights - self._weights_put_off())
        way = min(self.up[stage] for stage in self.stages)
        return self.head + computed + before + way + self.weights[0]

    def _work(self) -> Fraction:
        each = [self.forward[s] + self.inputs[s] + self.weights[s] for s in self.stages]
        return self.microbatches * sum(each, _NO)

    def _fit(self, stage: int) -> int:
        """How many micro-batches may be between F and the end of I of a stage."""
        whole = self.whole[stage]
        return min(self.microbatches, int(self.memory // whole)) if whole else self.microbatches

    def _there_and_back(self, stage: int) -> Fraction:
        """From the end of F of a stage to the start of its I."""
        last = len(self.forward) - 1
        down = self.down[last] + self.forward[last] - self.down[stage] - self.forward[stage]
        return down + self.up[last] + self.inputs[last] - self.up[stage] - self.inputs[stage]

    def _waits_at_start(self) -> Fraction:
        """Idle between the first F and the first I of the rank's first stage."""
        first, *others = self.stages
        fit, time, memory = self._fit(first), self.forward[first], self.memory
        way = self._there_and_back(first)
        if not others:
            return max(_NO, way - (fit - 1) * time)
        # Until the second stage has its first F, whose memory must be free; and from then on.
        second = others[0]
        until = self.down[second] - self.down[first] - time
        early = self._fit_beside(first, second)
        waits = max(_NO, until - max(0, early - 1) * time)
        each = sum((self.forward[s] + self.inputs[s] + self.weights[s] for s in others), _NO)
        room = memory - fit * self.whole[first]
        through = fit if room >= min(self.whole[s] for s in others) else max(1, fit - 1)
        return waits + max(_NO, way - until - (fit - 1) * time - through * each)

    def _fit_beside(self, stage: int, other: int) -> int:
        """How many micro-batches may be in one stage while another begins one."""
        whole = self.whole[stage]
        if not whole:
            return self.microbatches
        return min(self.microbatches, int((self.memory - self.whole[other]) // whole))

    def _waits_at_end(self) -> Fraction:
        """Idle between the last F and its I, on a rank with one stage."""
        stage, *others = self.stages
        if others:
            return _NO
        whole, kept, inputs = self.whole[stage], self.kept[stage], self.inputs[stage]
        weights, most = self.weights[stage], _NO
        for both in range(self._fit(stage)):
            others_left, room = self.microbatches - 1 - both, self.memory - whole * (both + 1)
            alone = min(others_left, int(room // kept)) if kept else others_left
            most = max(most, both * (inputs + weights) + alone * weights)
        return max(_NO, self._there_and_back(stage) - most)

    def _weights_put_off(self) -> Fraction:
        """The time of all W that can be left when the rank begins its last forward."""
        room = self.memory - min(self.whole[stage] for stage in self.stages)
        total = _NO
        for stage in sorted(self.stages, key=self._time_by_memory, reverse=True):
            kept, weights = self.kept[stage], self.weights[stage]
            count = Fraction(self.microbatches)
            if kept:
                count = min(count, room / kept)
            room -= count * kept
            total += count * weights
        # The last forward's own, which memory holds already.
        return total + max(self.weights[stage] for stage in self.stages)

    def _time_by_memory(self, stage: int) -> Fraction:
        kept = self.kept[stage]
        return self.weights[stage] / kept if kept else Fraction(2**62)

    def _area(self) -> Fraction:
        """Memory over time that all micro-batches take together, for the memory there is."""
        area = _NO
        for stage in self.stages:
            forward, inputs = self.forward[stage], self.inputs[stage]
            held = forward + self._there_and_back(stage) + inputs
            area += self.whole[stage] * held + self.kept[stage] * self.weights[stage]
        return self.microbatches * area / self.memory if self.memory else _NO


def _way(times: list[Fraction], hops: list[Fraction]) -> list[Fraction]:
    """For each stage, the time of all before it, and of their messages."""
    return list(accumulate((t + h for t, h in zip(times, hops, strict=True)), initial=_NO))[:-1]
