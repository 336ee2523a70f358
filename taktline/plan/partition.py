"""Cuts a list of layers into stages of equal cost, as far as possible."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any

from taktline.checks import require_iterable, require_whole, shown
from taktline.errors import CostError, PartitionError
from taktline.plan.action import LARGEST
from taktline.text import counted, table

__all__ = ["Partition", "balance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Consecutive layers in stages, and what each stage costs.

    >>> from taktline.plan import balance
    >>> cut = balance([1, 2, 3, 4, 5], 2)
    >>> cut.largest, cut.bounds, cut.sizes
    (9, (0, 3, 5), (3, 2))
    >>> ["abcde"[layers] for layers in cut.slices]
    ['abc', 'de']
    """

    bounds: tuple[int, ...]
    """Where stages begin and end: stage s has the layers ``bounds[s]`` up to ``bounds[s + 1]``."""
    stage_costs: tuple[float, ...]
    """What the layers of each stage cost together: whole numbers, if all costs are."""
    stage_memory: tuple[float, ...] | None = None
    """The same of the memory, if it was given."""

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.stage_costs)

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return self.bounds[-1]

    @property
    def largest(self) -> float:
        """The cost of the largest stage."""
        return max(self.stage_costs)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many layers each stage has."""
        return tuple(end - start for start, end in pairwise(self.bounds))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The layers of each stage, to take out of a list: ``layers[cut.slices[0]]``."""
        return tuple(slice(start, end) for start, end in pairwise(self.bounds))

    def __str__(self) -> str:
        rows = [["stage", "layers", "cost", "memory"]]
        for stage, (start, end) in enumerate(pairwise(self.bounds)):
            layers = f"{start}" if end - start == 1 else f"{start} – {end - 1}"
            memory = "" if self.stage_memory is None else _text(self.stage_memory[stage])
            rows.append([f"{stage}", layers, _text(self.stage_costs[stage]), memory])
        return (
            f"{counted(self.layers, 'layer')} in {counted(self.stages, 'stage')}, "
            f"the largest {_text(self.largest)}\n{table(rows)}"
        )


def balance(
    costs: Iterable[float],
    stages: int,
    *,
    memory: Iterable[float] | None = None,
    limits: float | Iterable[float] | None = None,
) -> Partition:
    """Consecutive layers cut into stages, so that the largest stage is as small as possible.

    Every stage has at least one layer. The result is exact, for floats too: each counts for just
    what it holds. Among the cuts with the smallest largest stage it is the most even one, with the
    smallest sum of squares of the stages' costs; among several of these, the one in which the last
    stage has the most layers, then the one before it, and so on: the first stages of a pipeline
    hold the most micro-batches.

    ``memory`` is what each layer needs, in bytes or any other unit, and ``limits`` what a stage can
    hold of it: one number for all stages, or one for each (``math.inf`` for no limit).

    >>> print(balance([100] * 11 + [300], 4))
    12 layers in 4 stages, the largest 400
    stage   layers  cost
        0    0 – 2   300
        1    3 – 5   300
        2    6 – 9   400
        3  10 – 11   400
    >>> balance([1] * 7, 4, memory=[8] * 7, limits=[8, 24, 24, 8]).sizes
    (1, 2, 3, 1)
    """
    amounts = _Amounts.of(costs=costs)
    layers = len(amounts.numbers)
    stages = _checked(stages, layers)
    needs = _needs(memory, limits, layers, stages)
    costs_to, needed_to = _sums(amounts.numbers), _sums(needs.numbers)

    def within(cap: int) -> Callable[[int, int], int]:
        return lambda stage, end: max(
            bisect_left(needed_to, needed_to[end] - needs.limits[stage]),
            bisect_left(costs_to, costs_to[end] - cap),
        )

    # Without limits there is a cut within the first cap, which spares most of the work.
    for cap in (costs_to[-1] // stages + max(amounts.numbers), costs_to[-1]):
        rough = _cheapest(costs_to, stages, within(cap), max)
        if rough is not None:
            break
    else:
        raise _too_small(needs, one=not isinstance(limits, Iterable))
    largest = max(costs_to[end] - costs_to[start] for start, end in pairwise(rough))
    bounds = _cheapest(costs_to, stages, within(largest), _add_square)
    assert bounds is not None  # the rough cut is one
    return Partition(
        bounds=bounds,
        stage_costs=amounts.of_stages(bounds),
        stage_memory=None if memory is None else needs.of_stages(bounds),
    )


def _needs(
    memory: Iterable[float] | None,
    limits: float | Iterable[float] | None,
    layers: int,
    stages: int,
) -> _Amounts:
    """What each layer needs, and what each stage can hold of it."""
    if memory is None and limits is not None:
        raise PartitionError("limits are given, but not the memory that each layer needs")
    needs = _Amounts.of(
        memory=[0] * layers if memory is None else memory, limits=_for_each(limits, stages)
    )
    if len(needs.numbers) != layers:
        raise PartitionError(
            f"memory is given for {counted(len(needs.numbers), 'layer')}, "
            f"costs for {counted(layers, 'layer')}"
        )
    return needs


def _cheapest(
    costs_to: Sequence[int],
    stages: int,
    first_start: Callable[[int, int], int],
    join: Callable[[int, int], int],
) -> tuple[int, ...] | None:
    """The bounds of the cheapest cut, by dynamic programming; None if there is no cut.

    ``first_start`` is where a stage begins at the earliest, given its end, and ``join`` adds a
    stage to what the ones before cost, which never makes it cheaper. In a draw, the last stage has
    the most layers, then the one before it, and so on.
    """
    layers = len(costs_to) - 1
    best, picks = {0: 0}, list[dict[int, int]]()
    for stage in range(stages):
        starts, found, pick = list(best), dict[int, int](), dict[int, int]()
        for end in range(stage + 1, layers - stages + stage + 2):
            least = math.inf
            first, last = first_start(stage, end), bisect_left(starts, end)
            for start in reversed(starts[bisect_left(starts, first) : last]):
                cost = costs_to[end] - costs_to[start]
                if join(0, cost) > least:
                    break  # and so is every longer stage
                if (joined := join(best[start], cost)) <= least:
                    least = found[end] = joined
                    pick[end] = start
        best = found
        picks.append(pick)
    if layers not in best:
        return None
    bounds = [layers]
    for pick in reversed(picks):
        bounds.append(pick[bounds[-1]])
    return tuple(reversed(bounds))


def _add_square(before: int, cost: int) -> int:
    return before + cost**2


def _sums(numbers: Iterable[int]) -> list[int]:
    return list(accumulate(numbers, initial=0))


@dataclass(frozen=True, slots=True)
class _Amounts:
    """Numbers as whole multiples of a unit that all of them share, so that sums are exact."""

    numbers: list[int]
    limits: list[int]
    unit: Fraction
    whole: bool
    """Whether whole numbers were given, so that their sums are to be whole numbers too."""

    @classmethod
    def of(cls, limits: Sequence[float] = (), **named: Iterable[float]) -> _Amounts:
        """The numbers, under the name that errors use, and limits on their sums."""
        ((name, values),) = named.items()
        given = require_iterable(name, values, "a list of numbers, one for each layer", CostError)
        exact = [_exact(f"{name} of layer {layer}", value) for layer, value in enumerate(given)]
        total = sum(exact, Fraction(0))
        bounded = [
            # No stage needs more than all, and infinity has no fraction.
            total if limit == math.inf else _exact(f"the limit of stage {stage}", limit)
            for stage, limit in enumerate(limits)
        ]
        below = math.lcm(*(number.denominator for number in (*exact, *bounded)))
        tops = [int(number * below) for number in (*exact, *bounded)]
        shared = math.gcd(*tops) or 1
        tops = [top // shared for top in tops]
        whole = all(isinstance(value, Integral) for value in given)
        amounts = cls(tops[: len(exact)], tops[len(exact) :], Fraction(shared, below), whole)
        try:
            amounts.plain(sum(amounts.numbers))
        except OverflowError:
            raise CostError(f"{name}: the sum of all layers is too large for a float") from None
        return amounts

    def plain(self, number: int) -> float:
        """A multiple of the unit as the number it stands for, rounded once."""
        value = number * self.unit
        return int(value) if self.whole and value.denominator == 1 else float(value)

    def of_stages(self, bounds: Sequence[int]) -> tuple[float, ...]:
        """What the layers of each stage have together."""
        return tuple(self.plain(sum(self.numbers[start:end])) for start, end in pairwise(bounds))


def _exact(what: str, value: Any) -> Fraction:
    """What a number holds; an error unless it is finite and from 0 up."""
    try:
        if isinstance(value, bool):
            raise TypeError
        # NumPy's integers have no ratio of their own.
        exact = Fraction(int(value)) if isinstance(value, Integral) else Fraction(*_ratio(value))
    except (TypeError, ValueError, OverflowError, AttributeError):
        exact = Fraction(-1)
    if exact < 0:
        raise CostError(f"{what} must be a number from 0 up, not {shown(value)}")
    return exact


def _ratio(value: Any) -> tuple[int, int]:
    over, under = value.as_integer_ratio()
    return over, under


def _checked(stages: Any, layers: int) -> int:
    """The number of stages, if the layers can be cut into so many."""
    stages = require_whole("stages", stages, least=1, error=PartitionError)
    if stages > layers:
        raise PartitionError(
            f"{counted(layers, 'layer')} cannot be cut into "
            f"{counted(stages, 'stage') if stages <= LARGEST else 'so many stages'}: each stage "
            f"needs at least one layer{f', so at most {layers} would do' if layers else ''}"
        )
    return stages


def _for_each(limits: float | Iterable[float] | None, stages: int) -> list[float]:
    """One limit for each stage."""
    if limits is None:
        return [math.inf] * stages
    if not isinstance(limits, Iterable):
        return [limits] * stages
    each = require_iterable("limits", limits, "a number, or one for each stage", PartitionError)
    if len(each) != stages:
        raise PartitionError(
            f"limits are given for {counted(len(each), 'stage')}, but there are {stages}; "
            "give one number for all, or one for each"
        )
    return each


def _too_small(needs: _Amounts, *, one: bool) -> PartitionError:
    """What to say of limits that no cut keeps within; ``one`` if it is one limit for all stages."""
    limits = needs.limits
    no_cut = f"no cut into {counted(len(limits), 'stage')} keeps within the limit"
    together = _raise_all(needs.numbers, limits)
    short = needs.plain(together)
    if one:
        least = needs.plain(together + limits[0])
        heaviest = max(range(len(needs.numbers)), key=needs.numbers.__getitem__)
        alone = needs.plain(needs.numbers[heaviest]) == least
        who = f"layer {heaviest} alone needs" if alone else "the best cut needs"
        return PartitionError(
            f"{no_cut} of {_text(needs.plain(limits[0]))}: it is too small by {_text(short)}, "
            f"as {who} {_text(least)}",
            short=short,
        )
    raised = _raise_one(needs.numbers, limits)
    if raised is None:
        return PartitionError(
            f"{no_cut}s; raising one of them does not help, raising each by {_text(short)} does",
            short=short,
        )
    more, stage = raised
    short, limit = needs.plain(more), needs.plain(limits[stage])
    return PartitionError(
        f"{no_cut}s: that of stage {stage}, {_text(limit)}, is too small by {_text(short)}",
        stage=stage,
        short=short,
    )


def _raise_all(numbers: Sequence[int], limits: Sequence[int]) -> int:
    """The least by which all limits together have to be raised, to let a cut through."""
    low, high = 0, sum(numbers)
    while low < high:
        middle = (low + high) // 2
        if len(numbers) in _reached(numbers, [limit + middle for limit in limits])[-1]:
            high = middle
        else:
            low = middle + 1
    return low


def _raise_one(numbers: Sequence[int], limits: Sequence[int]) -> tuple[int, int] | None:
    """The least that lets a cut through if one limit is raised by it, and that of which stage."""
    to, layers = _sums(numbers), len(numbers)
    ahead = _reached(numbers, limits)
    behind = _reached(numbers[::-1], limits[::-1])[::-1]
    found: list[tuple[int, int]] = []
    for stage, limit in enumerate(limits):
        for end in (layers - rest for rest in behind[stage + 1]):
            # From the last start before it: the shortest stage lacks the least.
            if starts := bisect_left(ahead[stage], end):
                found.append((to[end] - to[ahead[stage][starts - 1]] - limit, stage))
    return min(found, default=None)


def _reached(numbers: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
    """How many layers the first stages can hold: none of them, one, and so on."""
    to = _sums(numbers)
    reached = [[0]]
    for limit in limits:
        # The shortest stage is the lightest: if it does not fit, none does.
        starts = reached[-1]
        reached.append(
            [
                end
                for end in range(1, len(to))
                if (last := bisect_left(starts, end)) and to[end] - to[starts[last - 1]] <= limit
            ]
        )
    return reached


def _text(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.6g}"
