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

from taktline.checks import known_keywords, require_iterable, require_whole, shown
from taktline.errors import CostError, PartitionError
from taktline.plan.action import LARGEST
from taktline.text import counted, table


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Consecutive layers in stages, and the cost of each stage.

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
    """The cost of all layers of each stage: whole numbers, if all costs are."""
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


@known_keywords
def balance(
    costs: Iterable[float],
    stages: int,
    *,
    memory: Iterable[float] | None = None,
    limits: float | Iterable[float] | None = None,
) -> Partition:
    """Cut consecutive layers into stages, so that the largest stage is as small as possible.

    Every stage has at least one layer. The result is exact, for floats too. Among the cuts with the
    smallest largest stage it is the most even one, with the smallest sum of squares of the stages'
    costs; among several of these, the one in which the last stage has the most layers, then the
    one before it, and so on: the first stages of a pipeline hold the most micro-batches.

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
    sizes = _exact("costs", costs)
    layers = len(sizes)
    stages = _checked(stages, layers)
    if memory is None and limits is not None:
        raise PartitionError("limits need the memory of each layer")
    needs, most = _needs(memory, layers), _for_each(limits, stages)
    # Whole multiples of one unit, as whole numbers are quick.
    unit = math.lcm(*(size.denominator for size in sizes))
    costs_to, needs_to = _sums([int(size * unit) for size in sizes]), _sums(needs)

    def within(cap: int) -> Callable[[int, int], int]:
        return lambda stage, end: max(
            bisect_left(needs_to, needs_to[end] - most[stage]),
            bisect_left(costs_to, costs_to[end] - cap),
        )

    # Without limits there is a cut within the first cap, which spares most of the work.
    for cap in (costs_to[-1] // stages + int(max(sizes) * unit), costs_to[-1]):
        rough = _cheapest(costs_to, stages, within(cap), lambda _, before, cost: max(before, cost))
        if rough is not None:
            break
    else:
        raise _too_small(needs, most)
    largest = max(costs_to[end] - costs_to[start] for start, end in pairwise(rough))
    bounds = _cheapest(costs_to, stages, within(largest), lambda _, before, cost: before + cost**2)
    assert bounds is not None  # the rough cut is one
    return Partition(
        bounds=bounds,
        stage_costs=_totals(sizes, bounds),
        stage_memory=None if memory is None else _totals(needs, bounds),
    )


def _needs(memory: Iterable[float] | None, layers: int) -> list[int] | list[Fraction]:
    """The memory of each layer."""
    needs = [0] * layers if memory is None else _exact("memory", memory)
    if len(needs) != layers:
        raise PartitionError(
            f"memory is for {counted(len(needs), 'layer')}, costs are for "
            f"{counted(layers, 'layer')}"
        )
    return needs


def _cheapest(
    costs_to: Sequence[Any],
    stages: int,
    first_start: Callable[[int, int], int],
    join: Callable[[int, Any, Any], Any],
) -> tuple[int, ...] | None:
    """The bounds of the cheapest cut, by dynamic programming; None if there is no cut.

    ``first_start`` is where a stage begins at the earliest, given its end, and ``join`` adds a
    stage to what the ones before cost, which never makes it cheaper. In a draw, the last stage has
    the most layers, then the one before it, and so on.
    """
    layers = len(costs_to) - 1
    best, picks = {0: 0}, list[dict[int, int]]()
    for stage in range(stages):
        starts, found, pick = list(best), dict[int, Any](), dict[int, int]()
        for end in range(stage + 1, layers - stages + stage + 2):
            least = math.inf
            first, last = first_start(stage, end), bisect_left(starts, end)
            for start in reversed(starts[bisect_left(starts, first) : last]):
                cost = costs_to[end] - costs_to[start]
                if join(stage, 0, cost) > least:
                    break  # and so is every longer stage
                if (joined := join(stage, best[start], cost)) <= least:
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


def _exact(name: str, values: Iterable[float]) -> list[int] | list[Fraction]:
    """Numbers as exact fractions, so that sums are exact; whole numbers stay whole."""
    given = require_iterable(name, values, "a list of numbers, one for each layer", CostError)
    numbers = [_number(f"{name} of layer {layer}", value) for layer, value in enumerate(given)]
    try:
        float(sum(numbers))
    except OverflowError:
        raise CostError(f"{name}: the sum of all layers is too large for a float") from None
    return list(map(int, numbers)) if all(isinstance(v, Integral) for v in given) else numbers


def _number(what: str, value: Any) -> Fraction:
    """A number as an exact fraction; raises unless it is finite and from 0 up."""
    try:
        if isinstance(value, bool):
            raise TypeError
        # NumPy's integers have no ratio of their own.
        exact = Fraction(*(int(value) if isinstance(value, Integral) else value).as_integer_ratio())
    except (TypeError, ValueError, OverflowError, AttributeError):
        exact = Fraction(-1)
    if exact < 0:
        raise CostError(f"{what} must be a number from 0 up, not {shown(value)}")
    return exact


def _sums(numbers: Iterable[Any]) -> list[Any]:
    return list(accumulate(numbers, initial=0))


def _totals(numbers: Sequence[Any], bounds: Sequence[int]) -> tuple[float, ...]:
    """The sum over the layers of each stage."""
    return tuple(_plain(sum(numbers[start:end])) for start, end in pairwise(bounds))


def _plain(number: float | Fraction) -> float:
    return float(number) if isinstance(number, Fraction) else number


def _checked(stages: Any, layers: int) -> int:
    """The number of stages, if the layers can be cut into so many."""
    stages = require_whole("stages", stages, least=1, error=PartitionError)
    if stages > layers:
        raise PartitionError(
            f"{counted(layers, 'layer')} cannot be cut into "
            f"{counted(stages, 'stage') if stages <= LARGEST else 'so many stages'}: each stage "
            f"needs at least one layer{f', so use at most {layers}' if layers else ''}"
        )
    return stages


def _for_each(limits: float | Iterable[float] | None, stages: int) -> list[float | Fraction]:
    """One limit for each stage."""
    if limits is None or not isinstance(limits, Iterable):
        each = [math.inf if limits is None else limits] * stages
    else:
        each = require_iterable("limits", limits, "a number, or one for each stage", PartitionError)
    if len(each) != stages:
        raise PartitionError(
            f"limits are for {counted(len(each), 'stage')}, but there are {stages}; pass one "
            "number for all, or one for each"
        )
    return [
        limit if limit == math.inf else _number(f"the limit of stage {stage}", limit)
        for stage, limit in enumerate(each)
    ]


def _too_small(needs: Sequence[Any], limits: Sequence[Any]) -> PartitionError:
    """The error for limits that no cut keeps within; it names the stage that lacks the most.

    The cut is the best one: raising every limit by what this stage lacks lets it through.
    """
    to = _sums(needs)
    bounds = _cheapest(
        to,
        len(limits),
        lambda stage, end: 0,
        lambda stage, before, cost: max(before, cost - limits[stage]),
    )
    assert bounds is not None  # without limits there is always a cut
    used = [to[end] - to[start] for start, end in pairwise(bounds)]
    lacks = [need - limit for need, limit in zip(used, limits, strict=True)]
    stage = lacks.index(max(lacks))
    return PartitionError(
        f"no cut into {counted(len(limits), 'stage')} keeps within the limits: in the best one, "
        f"stage {stage} needs {_text(used[stage])} and can hold {_text(limits[stage])}; raise the "
        f"limits by {_text(lacks[stage])}",
        stage=stage,
        short=_plain(lacks[stage]),
    )


def _text(number: float | Fraction) -> str:
    whole = number == int(number) if isinstance(number, Fraction) else isinstance(number, int)
    return f"{int(number):,}" if whole else f"{float(number):,.6g}"
