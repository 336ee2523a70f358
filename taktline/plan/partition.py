"""Cuts a list of layers into stages of equal cost, as far as possible."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from numbers import Integral

from taktline.checks import check, check_list
from taktline.errors import CostError, PartitionError
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
            f"{counted(self.bounds[-1], 'layer')} in {counted(len(self.stage_costs), 'stage')}, "
            f"the largest {_text(self.largest)}\n{table(rows)}"
        )


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
    sizes = _exact("costs", costs, "layer")
    layers = len(sizes)
    asked = f"the number of stages for {counted(layers, 'layer')}"
    stages = check(asked, stages, int, least=1, most=layers, error=PartitionError)
    if memory is None and limits is not None:
        raise PartitionError("limits need the memory of each layer")
    needs = _exact("memory", [0] * layers if memory is None else memory, "layer", layers)
    if not isinstance(limits, Iterable):
        limits = [math.inf if limits is None else limits] * stages
    # What all layers need is as good as no limit.
    room = _exact("limits", limits, "stage", stages, infinity=sum(needs, Fraction()))
    # Whole multiples of a unit are exact, and faster than fractions.
    costs_to, _ = _in_whole_units(accumulate(sizes, initial=Fraction()))
    in_units, unit = _in_whole_units([*accumulate(needs, initial=Fraction()), *room])
    needs_to, holds = in_units[: layers + 1], in_units[layers + 1 :]

    def lack(stage: int, start: int, end: int) -> float:
        return max(0, needs_to[end] - needs_to[start] - holds[stage])

    def cost(stage: int, start: int, end: int) -> float:
        return math.inf if lack(stage, start, end) else costs_to[end] - costs_to[start]

    rough = cheapest(layers, stages, cost, max)
    if rough is None:
        # Raising every limit by what the worst stage of this cut lacks lets it through.
        nearest = list(enumerate(pairwise(cheapest(layers, stages, lack, max) or ())))
        stage, ends = max(nearest, key=lambda each: lack(each[0], *each[1]))
        short = Fraction(int(lack(stage, *ends)), unit)
        raise PartitionError(
            f"no cut into {counted(stages, 'stage')} keeps within the limits: in the best one, "
            f"stage {stage} needs {_text(room[stage] + short)} and can hold {_text(room[stage])}; "
            f"raise the limits by {_text(short)}",
            stage=stage,
            short=float(short),
        )
    largest = max(cost(stage, *ends) for stage, ends in enumerate(pairwise(rough)))

    def square(stage: int, start: int, end: int) -> float:
        size = cost(stage, start, end)
        return size**2 if size <= largest else math.inf

    bounds = cheapest(layers, stages, square, operator.add) or rough
    stage_memory = None if memory is None else _sums(needs, bounds)
    return Partition(bounds=bounds, stage_costs=_sums(sizes, bounds), stage_memory=stage_memory)


def cheapest(
    layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[int, ...] | None:
    """The bounds of the cheapest cut, by dynamic programming; None if there is no cut.

    ``cost`` is that of a stage with the layers from one up to another, infinite if it cannot be; it
    never falls as the stage grows. ``join`` adds it to what the stages before cost. In a draw, the
    last stage has the most layers, then the one before it, and so on.
    """
    best: dict[int, float] = {0: 0}
    picks: list[dict[int, int]] = []
    for stage in range(stages):
        found, pick = dict[int, float](), dict[int, int]()
        for end in range(stage + 1, layers - stages + stage + 2):
            least = math.inf
            for start in range(end - 1, stage - 1, -1):
                here = cost(stage, start, end)
                if here > least or here == math.inf:
                    break  # and so it is for every longer stage
                if start in best and (joined := join(best[start], here)) <= least:
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


def _exact(
    name: str,
    values: Iterable[float],
    noun: str,
    count: int | None = None,
    *,
    infinity: Fraction | None = None,
) -> list[Fraction]:
    """Numbers from 0 up, one for each layer or stage; infinite ones, if allowed, as another."""
    takes = f"a list of numbers, one for each {noun}"
    given = check_list(name, values, takes=takes, error=CostError)
    if count is not None and len(given) != count:
        raise PartitionError(
            f"{name} must have a number for each of {counted(count, noun)}, not {len(given)}"
        )
    numbers: list[Fraction] = []
    for at, value in enumerate(given):
        if infinity is not None and isinstance(value, float) and value == math.inf:
            numbers.append(infinity)
            continue
        number = check(f"{name} of {noun} {at}", value, float, least=0, error=CostError)
        numbers.append(Fraction(int(value) if isinstance(value, Integral) else number))
    if sum(numbers) > sys.float_info.max:
        raise CostError(f"{name}: the sum is too large for a float")
    return numbers


def _in_whole_units(numbers: Iterable[Fraction]) -> tuple[list[int], int]:
    """Numbers as multiples of the largest unit that makes all whole; and how many make 1."""
    listed = list(numbers)
    unit = math.lcm(*(number.denominator for number in listed))
    return [int(number * unit) for number in listed], unit


def _sums(numbers: Sequence[Fraction], bounds: Sequence[int]) -> tuple[float, ...]:
    """The sum over the layers of each stage; whole, if all numbers are."""
    kind = int if all(number.denominator == 1 for number in numbers) else float
    return tuple(kind(sum(numbers[start:end])) for start, end in pairwise(bounds))


def _text(number: float | Fraction) -> str:
    return f"{int(number):,}" if number == int(number) else f"{float(number):,.6g}"
