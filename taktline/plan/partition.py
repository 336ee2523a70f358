"""Layers cut into stages, as even as can be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from numbers import Integral
from typing import Any

from taktline.checks import require_iterable, require_whole, shown
from taktline.errors import CostError, PartitionError
from taktline.plan.action import LARGEST
from taktline.plan.cuts import (
    first_starts,
    most_even,
    raise_all,
    raise_one,
    smallest_largest,
    sums_of,
)
from taktline.plan.words import counted

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
        table = [["stage", "layers", "cost"]]
        for stage, (start, end) in enumerate(pairwise(self.bounds)):
            layers = f"{start}" if end - start == 1 else f"{start} – {end - 1}"
            table.append([f"{stage}", layers, _text(self.stage_costs[stage])])
        if self.stage_memory is not None:
            for row, text in zip(table, ["memory", *map(_text, self.stage_memory)], strict=True):
                row.append(text)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [f"{counted(self.layers, 'layer')} in {counted(self.stages, 'stage')}, "]
        lines[0] += f"the largest {_text(self.largest)}"
        for row in table:
            lines.append("  ".join(map(str.rjust, row, widths)))
        return "\n".join(lines)


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
    sums, needed = sums_of(amounts.numbers), sums_of(needs.numbers)
    starts = None if limits is None else [first_starts(needed, limit) for limit in needs.limits]
    largest = smallest_largest(sums, stages, starts)
    if largest is None:
        raise _too_small(needs, one=not isinstance(limits, Iterable))
    bounds = most_even(sums, largest, stages, starts)
    return Partition(
        bounds=bounds,
        stage_costs=amounts.of_stages(bounds),
        stage_memory=None if memory is None else needs.of_stages(bounds),
    )


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
        """The numbers given by name, which errors tell, and limits on their sums."""
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
    sums, limits = sums_of(needs.numbers), needs.limits
    no_cut = f"no cut into {counted(len(limits), 'stage')} keeps within the limit"
    if one:
        short = needs.plain(raise_all(sums, limits))
        least = needs.plain(raise_all(sums, limits) + limits[0])
        text = f"{no_cut} of {_text(needs.plain(limits[0]))}: it is too small by {_text(short)}"
        heaviest = max(range(len(needs.numbers)), key=needs.numbers.__getitem__)
        alone = needs.plain(needs.numbers[heaviest]) == least
        who = f"layer {heaviest} alone needs" if alone else "the best cut needs"
        return PartitionError(f"{text}, as {who} {_text(least)}", short=short)
    found = raise_one(sums, limits)
    if found is None:
        short = needs.plain(raise_all(sums, limits))
        text = "raising one of them does not help, raising each by"
        return PartitionError(f"{no_cut}s; {text} {_text(short)} does", short=short)
    stage, more = found
    short, limit = needs.plain(more), needs.plain(limits[stage])
    return PartitionError(
        f"{no_cut}s: that of stage {stage}, {_text(limit)}, is too small by {_text(short)}",
        stage=stage,
        short=short,
    )


def _text(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.6g}"
