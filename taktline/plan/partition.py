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

from taktline.checks import check, check_list, known_keywords
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
    sizes, unit = _exact("costs", costs)
    layers, stages = len(sizes), _stages(stages, len(sizes))
    if memory is None and limits is not None:
        raise PartitionError("limits need the memory of each layer")
    needs, memory_unit = _exact("memory", [0] * layers if memory is None else memory)
    if len(needs) != layers:
        raise PartitionError(
            f"memory is for {counted(len(needs), 'layer')}, costs are for "
            f"{counted(layers, 'layer')}"
        )
    most = [limit * memory_unit for limit in _limits(limits, stages)]
    costs_to, needs_to = (list(accumulate(each, initial=0)) for each in (sizes, needs))

    def within(cap: int) -> Callable[[int, int], int]:
        return lambda stage, end: max(
            bisect_left(needs_to, needs_to[end] - most[stage]),
            bisect_left(costs_to, costs_to[end] - cap),
        )

    # Without limits there is a cut within the first cap, which spares most of the work.
    for cap in (costs_to[-1] // stages + max(sizes), costs_to[-1]):
        rough = _cheapest(costs_to, stages, within(cap), lambda _, before, cost: max(before, cost))
        if rough is not None:
            break
    else:
        raise _too_much(needs_to, most, memory_unit)
    largest = max(costs_to[end] - costs_to[start] for start, end in pairwise(rough))
    bounds = _cheapest(costs_to, stages, within(largest), lambda _, before, cost: before + cost**2)
    assert bounds is not None  # the rough cut is one
    return Partition(
        bounds=bounds,
        stage_costs=_totals(costs_to, unit, bounds),
        stage_memory=None if memory is None else _totals(needs_to, memory_unit, bounds),
    )


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


def _exact(name: str, values: Iterable[float]) -> tuple[list[int], int]:
    """Numbers as whole multiples of 1/unit, so that sums are exact; and the unit."""
    given = check_list(name, values, takes="a list of numbers, one for each layer", error=CostError)
    numbers = [_number(f"{name} of layer {layer}", value) for layer, value in enumerate(given)]
    try:
        float(sum(numbers))
    except OverflowError:
        raise CostError(f"{name}: the sum of all layers is too large for a float") from None
    unit = math.lcm(*(number.denominator for number in numbers))
    return [int(number * unit) for number in numbers], unit


def _number(what: str, value: Any) -> Fraction:
    """A number as an exact fraction; raises unless it is finite and from 0 up."""
    number = check(what, value, float, least=0, error=CostError)
    return Fraction(int(value) if isinstance(value, Integral) else number)


def _stages(stages: int, layers: int) -> int:
    """The number of stages, if the layers can be cut into so many."""
    stages = check("stages", stages, int, least=1, error=PartitionError)
    if stages > layers:
        raise PartitionError(
            f"{counted(layers, 'layer')} cannot be cut into "
            f"{counted(stages, 'stage') if stages <= LARGEST else 'so many stages'}: each stage "
            f"needs at least one layer{f', so use at most {layers}' if layers else ''}"
        )
    return stages


def _limits(limits: float | Iterable[float] | None, stages: int) -> list[Any]:
    """One limit for each stage."""
    if limits is None or not isinstance(limits, Iterable):
        limits = [math.inf if limits is None else limits] * stages
    given = check_list("limits", limits, takes="a number for each stage", error=PartitionError)
    if len(given) != stages:
        raise PartitionError(
            f"limits are for {counted(len(given), 'stage')}, but there are {stages}; pass one "
            "number for all, or one for each"
        )
    return [
        limit if limit == math.inf else _number(f"the limit of stage {stage}", limit)
        for stage, limit in enumerate(given)
    ]


def _too_much(needs_to: Sequence[int], limits: Sequence[Any], unit: int) -> PartitionError:
    """The error for limits that no cut keeps within; it names the stage that lacks the most.

    The cut is the best one: raising every limit by what this stage lacks lets it through.
    """
    bounds = _cheapest(
        needs_to,
        len(limits),
        lambda stage, end: 0,
        lambda stage, before, cost: max(before, cost - limits[stage]),
    )
    assert bounds is not None  # without limits there is always a cut
    used = [needs_to[end] - needs_to[start] for start, end in pairwise(bounds)]
    lacks = [need - limit for need, limit in zip(used, limits, strict=True)]
    stage = lacks.index(max(lacks))
    need, limit, short = used[stage] / unit, limits[stage] / unit, lacks[stage] / unit
    return PartitionError(
        f"no cut into {counted(len(limits), 'stage')} keeps within the limits: in the best one, "
        f"stage {stage} needs {_text(need)} and can hold {_text(limit)}; raise the limits by "
        f"{_text(short)}",
        stage=stage,
        short=float(short),
    )


def _totals(sums: Sequence[int], unit: int, bounds: Sequence[int]) -> tuple[float, ...]:
    """The sum over the layers of each stage; whole, if all numbers are."""
    totals = [sums[end] - sums[start] for start, end in pairwise(bounds)]
    return tuple(totals if unit == 1 else (total / unit for total in totals))


def _text(number: float | Fraction) -> str:
    return f"{int(number):,}" if number == int(number) else f"{float(number):,.6g}"
