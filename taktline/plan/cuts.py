"""Cuts of a row of layers into stages, found exactly, on whole numbers.

A stage is the layers from its start up to, not including, its end. Amounts come as running sums::

    layers    3   1   4   1   5
    sums    0   3   4   8   9   14      a stage from 1 to 4 has 9 - 3 = 6
    at      0   1   2   3   4   5

What fits is told by the *first start* of each end: a stage that fits still fits when its first
layers are left out, so all starts from there on fit too. Where several limits are to be kept, the
latest of their first starts counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["first_starts", "most_even", "raise_all", "raise_one", "smallest_largest", "sums_of"]

Sums: TypeAlias = NDArray[Any]
"""Whole numbers that never go down: int64, or Python's own where these are too small."""
Places: TypeAlias = NDArray[np.int64]
Starts: TypeAlias = Sequence[Places]
"""For each stage, the first start of each end."""


def sums_of(numbers: Iterable[int]) -> Sums:
    """Running sums from 0.

    >>> sums_of([3, 1, 4, 1, 5])
    array([ 0,  3,  4,  8,  9, 14])
    """
    sums = list(accumulate(numbers, initial=0))
    return np.array(sums, np.int64 if sums[-1] < 2**62 else object)


def first_starts(sums: Sums, limit: int) -> Places:
    """For each end, the first start of a stage within the limit; the end itself if there is none.

    >>> first_starts(sums_of([3, 1, 4, 1, 5]), 4)
    array([0, 0, 0, 2, 3, 5])
    """
    # No stage has more than all; the minimum keeps a larger limit from overflowing.
    return np.searchsorted(sums, sums - min(limit, sums[-1]))


def smallest_largest(sums: Sums, stages: int, limits: Starts | None = None) -> int | None:
    """The largest stage of the best cut; None if no cut keeps within the limits.

    A search by halves, in which both ends move only to sums that stages have: so it ends at one.

    >>> smallest_largest(sums_of([3, 1, 4, 1, 5]), 3)
    5
    """

    def try_cap(cap: int) -> int | None:
        bounds = _any_cut(_within(first_starts(sums, cap), stages, limits))
        if bounds is None:
            return None
        return max(int(sums[end] - sums[start]) for start, end in pairwise(bounds))

    total = int(sums[-1])
    high = try_cap(total)
    if high is None:
        return None
    cap = low = max(int((sums[1:] - sums[:-1]).max()), -(-total // stages))
    while low < high:
        largest = try_cap(cap)
        if largest is not None:
            high = largest
        else:
            low = _next_sum(sums, cap)
        cap = (low + high) // 2
    return high


def most_even(sums: Sums, cap: int, stages: int, limits: Starts | None = None) -> tuple[int, ...]:
    """The cut within cap and limits with the smallest sum of squares; there must be one.

    Dynamic programming over the stages. The squares of sums obey the quadrangle inequality, and
    so they do with the stages that do not fit taken out: the best start never goes back as the end
    goes on. :func:`_best_starts` needs that.

    >>> most_even(sums_of([1] * 7), 2, 4)
    (0, 1, 3, 5, 7)
    """
    if int(sums[-1]) >= 2**31:  # its square would overflow
        sums = sums.astype(object)
    starts = _within(first_starts(sums, cap), stages, limits)
    # Only cuts that are part of a whole one: near the optimum, these are few.
    cuts = [
        np.flatnonzero(ahead & behind)
        for ahead, behind in zip(_reached(starts), _reaching(starts), strict=True)
    ]
    best = np.zeros(1, sums.dtype)
    chosen: list[Places] = []
    for first, here, after in zip(starts, cuts, cuts[1:], strict=False):
        low, high = np.searchsorted(here, first[after]), np.searchsorted(here, after) - 1
        pick, best = _best_starts(best, sums[here], sums[after], low, high)
        chosen.append(here[pick])
    bounds = [len(sums) - 1]
    for after, pick in zip(reversed(cuts), reversed(chosen), strict=False):
        bounds.append(int(pick[np.searchsorted(after, bounds[-1])]))
    return tuple(reversed(bounds))


def raise_one(sums: Sums, limits: Sequence[int]) -> tuple[int, int] | None:
    """The stage whose limit, raised alone, lets a cut through, and the least that it needs.

    >>> raise_one(sums_of([3, 1, 4, 1, 5]), [4, 4, 5])
    (1, 1)
    """
    starts = [first_starts(sums, limit) for limit in limits]
    reached, reaching = _reached(starts), _reaching(starts)
    found: list[tuple[int, int]] = []
    for stage, limit in enumerate(limits):
        start = _last(reached[stage])[:-1]
        ends = np.flatnonzero(reaching[stage + 1][1:] & (start >= 0))
        if len(ends):
            found.append((int((sums[ends + 1] - sums[start[ends]]).min()) - limit, stage))
    if not found:
        return None
    short, stage = min(found)
    return stage, short


def raise_all(sums: Sums, limits: Sequence[int]) -> int:
    """The least by which all limits together have to be raised, to let a cut through.

    >>> raise_all(sums_of([3, 1, 4, 1, 5]), [2, 2, 2])
    3
    """

    def lets_through(more: int) -> bool:
        return _any_cut([first_starts(sums, limit + more) for limit in limits]) is not None

    return _least(lets_through, int(sums[-1]))


def _least(holds: Callable[[int], bool], high: int) -> int:
    """The least number from 0 for which something holds, as it does from there up to ``high``."""
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _within(cap: Places, stages: int, limits: Starts | None) -> Starts:
    """The first starts that keep within a cap on every stage, and the limits."""
    if limits is None:
        return [cap] * stages
    return [np.maximum(cap, first) for first in limits]


def _next_sum(sums: Sums, cap: int) -> int:
    """The smallest sum of a stage that is more than the cap; there must be one."""
    first = first_starts(sums, cap)
    ends = np.flatnonzero(first)
    return int((sums[ends] - sums[first[ends] - 1]).min())


def _last(marks: NDArray[np.bool_]) -> Places:
    """For each place the last mark up to it, or -1."""
    return np.maximum.accumulate(np.where(marks, np.arange(len(marks)), -1))


def _reached(starts: Starts) -> list[NDArray[np.bool_]]:
    """Where the stages from the first on can end: before any, after one, and so on."""
    here = np.arange(len(starts[0])) == 0
    found = [here]
    for first in starts:
        # The last start is the shortest stage: if that does not fit, none does.
        fits = _last(here)[:-1] >= first[1:]
        here = np.concatenate(([False], fits))
        found.append(here)
    return found


def _reaching(starts: Starts) -> list[NDArray[np.bool_]]:
    """Where the stages up to the last can begin: all of them, all but one, and so on to none."""
    layers = len(starts[0]) - 1
    places = np.arange(layers + 1)
    here = places == layers
    found = [here]
    for first in reversed(starts):
        end = (layers - _last(here[::-1]))[::-1][1:]  # the next one; one too far if there is none
        fits = (end <= layers) & (first[np.minimum(end, layers)] <= places[:-1])
        here = np.concatenate((fits, [False]))
        found.append(here)
    return found[::-1]


def _any_cut(starts: Starts) -> list[int] | None:
    """Some cut that fits, or None."""
    reached = _reached(starts)
    if not reached[-1][-1]:
        return None
    bounds = [len(starts[0]) - 1]
    for here in reversed(reached[:-1]):
        # argmax finds the first True: backwards from the end, the last start.
        bounds.append(bounds[-1] - 1 - int(here[: bounds[-1]][::-1].argmax()))
    return bounds[::-1]


def _best_starts(
    best: Sums, at_start: Sums, at_end: Sums, low: Places, high: Places
) -> tuple[Places, Sums]:
    """For each end the best start of ``low`` to ``high``, the first if several, and its cost.

    Divide and conquer: the start of an end in the middle bounds those of the ends on both sides.
    All ends of a level are looked at together::

        level 0          3              each looks between what its neighbours above have found,
        level 1      1       5          so a level looks at every start about once
        level 2    0   2   4   6
    """
    ends = len(at_end)
    pick = np.zeros(ends, np.int64)
    cost = np.zeros(ends, at_end.dtype)
    step = 1 << (ends.bit_length() - 1)
    while step:
        these = np.arange(step - 1, ends, 2 * step)
        left, right = low[these], high[these]
        left[1:] = np.maximum(left[1:], pick[these[1:] - step])
        inner = these + step < ends
        right[inner] = np.minimum(right[inner], pick[these[inner] + step])
        lengths = right - left + 1
        offsets = np.cumsum(lengths) - lengths
        tried: Places = np.arange(int(lengths.sum())) - np.repeat(offsets - left, lengths)
        costs = best[tried] + (np.repeat(at_end[these], lengths) - at_start[tried]) ** 2
        cost[these] = np.minimum.reduceat(costs, offsets)
        hits = np.flatnonzero(costs == np.repeat(cost[these], lengths))
        pick[these] = tried[hits[np.searchsorted(hits, offsets)]]
        step //= 2
    return pick, cost
