"""Balanced cuts: known ones, every cut of small rows as a second opinion, limits, and speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from taktline.errors import CostError, PartitionError
from taktline.plan import balance

Numbers = Sequence[float]

whole = st.integers(0, 12)
# Floats that differ in size, so that rounded sums would go wrong; and whole numbers beyond 64 bits.
layer_costs = st.one_of(
    whole,
    st.floats(0, 1e9),
    st.sampled_from([0.1, 0.2, 0.3, 1e-300, 1e16, 1.0]),
    st.integers(0, 2**80),
)


@st.composite
def rows(draw: st.DrawFn, numbers: st.SearchStrategy[float] = layer_costs) -> tuple[Numbers, int]:
    costs = draw(st.lists(numbers, min_size=1, max_size=8))
    return costs, draw(st.integers(1, len(costs)))


def all_cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


def sums(numbers: Numbers, bounds: Sequence[int]) -> list[Fraction]:
    return [sum(map(Fraction, numbers[a:b]), Fraction(0)) for a, b in pairwise(bounds)]


def fits(memory: Numbers, limits: Numbers, bounds: Sequence[int]) -> bool:
    return all(need <= limit for need, limit in zip(sums(memory, bounds), limits, strict=True))


def best_of(costs: Numbers, cuts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The promise of balance, word by word."""

    def order(bounds: tuple[int, ...]) -> tuple[Any, ...]:
        stages = sums(costs, bounds)
        return max(stages), sum(cost**2 for cost in stages), bounds[::-1]

    return min(cuts, key=order)


@pytest.mark.parametrize(
    ("costs", "stages", "sizes"),
    [
        ([1] * 7, 4, (1, 2, 2, 2)),
        ([100] * 11 + [300], 4, (3, 3, 4, 2)),
        ([0] * 5, 2, (1, 4)),
        # 1e16 + 1 is 1e16 as a float, so rounded sums would not see which cut is better.
        ([1.0, 1e16, 1e16], 2, (2, 1)),
        ([1e16, 1.0, 2.0, 1e16], 2, (2, 2)),
    ],
)
def test_known_cuts(costs: Numbers, stages: int, sizes: tuple[int, ...]) -> None:
    assert balance(costs, stages).sizes == sizes


@given(rows())
@example(([1, 1e16], 1))
def test_is_the_best_of_all_cuts(row: tuple[Numbers, int]) -> None:
    costs, stages = row
    cut = balance(costs, stages)
    assert cut.bounds == best_of(costs, list(all_cuts(len(costs), stages)))
    kind = int if all(cost == int(cost) for cost in costs) else float
    assert list(cut.stage_costs) == list(map(kind, sums(costs, cut.bounds)))


@given(rows(), st.data())
def test_is_the_best_within_limits_or_says_what_is_lacking(
    row: tuple[Numbers, int], data: st.DataObject
) -> None:
    costs, stages = row
    memory = data.draw(st.lists(whole, min_size=len(costs), max_size=len(costs)))
    limits = data.draw(st.lists(st.integers(0, 30), min_size=stages, max_size=stages))
    cuts = list(all_cuts(len(costs), stages))

    def fitting(more: float = 0) -> list[tuple[int, ...]]:
        raised = [limit + more for limit in limits]
        return [bounds for bounds in cuts if fits(memory, raised, bounds)]

    if fitting():
        cut = balance(costs, stages, memory=memory, limits=limits)
        assert cut.bounds == best_of(costs, fitting())
        assert cut.stage_memory is not None
        assert list(cut.stage_memory) == sums(memory, cut.bounds)
        return
    with pytest.raises(PartitionError, match="no cut into") as caught:
        balance(costs, stages, memory=memory, limits=limits)
    stage, short = caught.value.stage, caught.value.short
    assert stage is not None
    assert short is not None
    # Raised by just so much, the limits let a cut through; by less, they do not.
    assert not fitting(short - 1)
    assert any(sums(memory, bounds)[stage] == limits[stage] + short for bounds in fitting(short))


def test_limits() -> None:
    assert balance([1] * 4, 2, memory=[9, 1, 1, 1], limits=9).sizes == (1, 3)
    assert balance([1] * 6, 2, memory=[2] * 6, limits=[2, math.inf]).sizes == (1, 5)
    # A float limit leaves bytes whole.
    assert repr(balance([1, 1], 1, memory=[2, 3], limits=5.5).stage_memory) == "(5,)"
    with pytest.raises(PartitionError) as caught:
        balance([1, 1, 1], 3, memory=[4, 4, 4], limits=[2, 2, 3.5])
    assert str(caught.value) == (
        "no cut into 3 stages keeps within the limits: in the best one, stage 0 needs 4 and can "
        "hold 2; raise the limits by 2"
    )


NOT_A_COST = r"costs of layer 1 must be a number from 0 up, not "


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (([1, 1], 3), PartitionError, "of stages for 2 layers must be .* from 1 to 2, not 3"),
        (([], 1), PartitionError, "the number of stages for 0 layers"),
        (([1], 1.0), PartitionError, r"a whole number from 1 to 1, not 1\.0"),
        *((([1, odd], 1), CostError, NOT_A_COST) for odd in (-1, math.nan, math.inf, "1", [1])),
        (([1e308, 1e308], 2), CostError, "costs: the sum is too large for a float"),
        (([1, 1], 2, [1], 1), PartitionError, "memory must have a number for each of 2 layers"),
        (([1, 1], 2, None, 1), PartitionError, "limits need the memory of each layer"),
        (([1, 1], 2, [1, 1], [1]), PartitionError, "limits must have a number for each of 2 stag"),
        (([1, 1], 2, [1, -1]), CostError, "memory of layer 1 must be a number from 0 up, not -1"),
        (([1, 1], 2, [1, 1], math.nan), CostError, "limits of stage 0 must be .* not nan"),
    ],
)
def test_wrong_numbers(arguments: Any, kind: type[Exception], message: str) -> None:
    optional = dict(zip(("memory", "limits"), arguments[2:], strict=False))
    with pytest.raises(kind, match=message):
        balance(*arguments[:2], **optional)


def test_many_layers_of_numpy_numbers() -> None:
    random = np.random.default_rng(0)
    costs, memory = random.random(300), random.integers(1, 2**30, 300)
    limit = int(memory.sum()) // 32 * 5 // 4
    free, limited = balance(costs, 32), balance(costs, 32, memory=memory, limits=limit)
    assert len(free.stage_costs) == len(limited.stage_costs) == 32
    assert costs.sum() / 32 < free.largest <= limited.largest
