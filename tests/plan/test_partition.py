"""Balanced cuts: known ones, every cut of small rows as a second opinion, limits, and speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, chain, combinations, pairwise
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
        ([1000, *[1] * 100], 8, (1, 14)),
        ([3, 0, 5], 3, (1, 1, 1)),
        ([3, 0, 5], 1, (3,)),
        ([0] * 5, 2, (1, 4)),
        # 1e16 + 1 is 1e16 as a float, so rounded sums would not see which cut is better.
        ([1.0, 1e16, 1e16], 2, (2, 1)),
        ([1e16, 1.0, 2.0, 1e16], 2, (2, 2)),
    ],
)
def test_known_cuts(costs: Numbers, stages: int, sizes: tuple[int, ...]) -> None:
    assert balance(costs, stages).sizes[: len(sizes)] == sizes


class TestEveryCut:
    @given(rows())
    @example(([1, 1e16], 1))
    def test_is_the_best_of_all(self, row: tuple[Numbers, int]) -> None:
        costs, stages = row
        cut = balance(costs, stages)
        assert cut.bounds == best_of(costs, list(all_cuts(len(costs), stages)))
        exact = sums(costs, cut.bounds)
        if all(cost == int(cost) for cost in costs):
            assert list(cut.stage_costs) == exact
        else:
            assert list(cut.stage_costs) == list(map(float, exact))

    @given(rows(), st.data())
    def test_within_limits(self, row: tuple[Numbers, int], data: st.DataObject) -> None:
        costs, stages = row
        memory = data.draw(st.lists(whole, min_size=len(costs), max_size=len(costs)))
        limits = data.draw(st.lists(st.integers(0, 30), min_size=stages, max_size=stages))
        cuts = list(all_cuts(len(costs), stages))
        fitting = [bounds for bounds in cuts if fits(memory, limits, bounds)]
        if fitting:
            cut = balance(costs, stages, memory=memory, limits=limits)
            assert cut.bounds == best_of(costs, fitting)
            assert cut.stage_memory is not None
            assert list(cut.stage_memory) == sums(memory, cut.bounds)
            return
        with pytest.raises(PartitionError) as caught:
            balance(costs, stages, memory=memory, limits=limits)
        self.check_what_is_lacking(caught.value, memory, limits, cuts)

    @staticmethod
    def check_what_is_lacking(
        error: PartitionError, memory: Numbers, limits: list[int], cuts: list[tuple[int, ...]]
    ) -> None:
        """Raised by just so much, the limits let a cut through; by less, they do not."""

        def fitting(more: float) -> list[tuple[int, ...]]:
            raised = [limit + more for limit in limits]
            return [bounds for bounds in cuts if fits(memory, raised, bounds)]

        assert error.short is not None
        assert error.stage is not None
        assert not fitting(error.short - 1)
        need = limits[error.stage] + error.short
        assert any(sums(memory, bounds)[error.stage] == need for bounds in fitting(error.short))

    @given(rows(), st.data())
    def test_one_limit_for_all(self, row: tuple[Numbers, int], data: st.DataObject) -> None:
        costs, stages = row
        memory = data.draw(st.lists(whole, min_size=len(costs), max_size=len(costs)))
        needed = balance(memory, stages).largest
        cut = balance(costs, stages, memory=memory, limits=needed)
        assert cut == balance(costs, stages, memory=memory, limits=[needed] * stages)
        if needed:
            with pytest.raises(PartitionError, match=r"; raise the limits by 1$") as caught:
                balance(costs, stages, memory=memory, limits=needed - 1)
            assert caught.value.short == 1

    @given(st.lists(st.integers(0, 50), min_size=20, max_size=60), st.integers(2, 8))
    def test_longer_rows(self, costs: list[int], stages: int) -> None:
        """Against another dynamic programme, on rows that are too long to try every cut."""
        at = [0, *accumulate(costs)]
        ends = range(1, len(costs) + 1)

        def least(join: Callable[[float, int], float]) -> float:
            best: list[float] = [0.0, *(math.inf for _ in costs)]
            for _ in range(stages):
                found = [
                    min(join(best[start], at[end] - at[start]) for start in range(end))
                    for end in ends
                ]
                best = [math.inf, *found]
            return best[-1]

        cut = balance(costs, stages)
        assert cut.largest == least(max)

        def squares(before: float, cost: int) -> float:
            return before + cost**2 if cost <= cut.largest else math.inf

        assert sum(cost**2 for cost in cut.stage_costs) == least(squares)


class TestLimits:
    def test_sizes(self) -> None:
        four, six = [1] * 4, [1] * 6
        assert balance(four, 2, memory=[9, 1, 1, 1], limits=10).sizes == (2, 2)
        assert balance(four, 2, memory=[9, 1, 1, 1], limits=9).sizes == (1, 3)
        assert balance(six, 3, memory=[2] * 6, limits=[2, 2, 8]).stage_memory == (2, 2, 8)
        assert balance(six, 2, memory=[2] * 6, limits=[2, math.inf]).sizes == (1, 5)
        assert balance(four, 2, memory=[1, 2, 3, 4]).stage_memory == (3, 7)

    def test_a_float_limit_leaves_bytes_whole(self) -> None:
        assert repr(balance([1, 1], 1, memory=[2, 3], limits=5.5).stage_memory) == "(5,)"

    @pytest.mark.parametrize(
        ("stages", "memory", "limits", "message"),
        [
            (
                2,
                [4, 4, 4],
                6,
                "no cut into 2 stages keeps within the limits: in the best one, stage 1 needs 8 "
                "and can hold 6; raise the limits by 2",
            ),
            (
                3,
                [4, 4, 4],
                [1, 2, 3.5],
                "no cut into 3 stages keeps within the limits: in the best one, stage 0 needs 4 "
                "and can hold 1; raise the limits by 3",
            ),
        ],
    )
    def test_too_small(self, stages: int, memory: Numbers, limits: Any, message: str) -> None:
        with pytest.raises(PartitionError) as caught:
            balance([1, 1, 1], stages, memory=memory, limits=limits)
        assert str(caught.value) == message


class TestErrors:
    @pytest.mark.parametrize(
        ("costs", "stages", "message"),
        [
            (
                [1, 1],
                3,
                "2 layers cannot be cut into 3 stages: each stage needs at least one layer, so use "
                "at most 2",
            ),
            ([], 1, "0 layers cannot be cut into 1 stage: each stage needs at least one layer"),
            ([1], 0, "stages must be a whole number from 1 up, not 0"),
            ([1], 1.0, "stages must be a whole number from 1 up, not 1.0"),
            ([1], True, "stages must be a whole number from 1 up, not True"),
        ],
    )
    def test_stages(self, costs: Numbers, stages: Any, message: str) -> None:
        with pytest.raises(PartitionError) as caught:
            balance(costs, stages)
        assert str(caught.value) == message

    @pytest.mark.parametrize("cost", [-1, -0.5, math.nan, math.inf, "1", None, True, [1]])
    def test_costs(self, cost: Any) -> None:
        with pytest.raises(CostError) as caught:
            balance([1, cost], 1)
        assert str(caught.value) == f"costs of layer 1 must be a number from 0 up, not {cost!r}"

    def test_a_sum_beyond_floats(self) -> None:
        with pytest.raises(
            CostError, match="costs: the sum of all layers is too large for a float"
        ):
            balance([1e308, 1e308], 2)

    @pytest.mark.parametrize(
        ("memory", "limits", "kind", "message"),
        [
            ([1], 1, PartitionError, "memory is for 1 layer, costs are for 2 layers"),
            (None, 1, PartitionError, "limits need the memory of each layer"),
            (
                [1, 1],
                [1],
                PartitionError,
                "limits are for 1 stage, but there are 2; pass one number for all, or one for each",
            ),
            ([1, -1], 1, CostError, "memory of layer 1 must be a number from 0 up, not -1"),
            ([1, 1], [1, -1], CostError, "the limit of stage 1 must be a number from 0 up, not -1"),
            (
                [1, 1],
                math.nan,
                CostError,
                "the limit of stage 0 must be a number from 0 up, not nan",
            ),
        ],
    )
    def test_memory(self, memory: Any, limits: Any, kind: type[Exception], message: str) -> None:
        with pytest.raises(kind) as caught:
            balance([1, 1], 2, memory=memory, limits=limits)
        assert str(caught.value) == message


class TestResult:
    def test_in_words(self) -> None:
        cut = balance([1.5, 2.5, 1000.25], 2, memory=[1, 2, 3])
        assert str(cut).splitlines() == [
            "3 layers in 2 stages, the largest 1,000.25",
            "stage  layers      cost  memory",
            "    0   0 – 1         4       3",
            "    1       2  1,000.25       3",
        ]

    def test_slices_hold_every_layer_once(self) -> None:
        layers = list(range(17))
        cut = balance([1] * 17, 5)
        assert list(chain.from_iterable(layers[part] for part in cut.slices)) == layers
        assert (cut.layers, cut.stages) == (17, 5)

    @pytest.mark.parametrize(
        "costs",
        [np.array([1, 2, 3]), np.array([1, 2, 3], np.float32), [1, Fraction(2), 3]],
        ids=["int64", "float32", "mixed"],
    )
    def test_other_numbers(self, costs: Any) -> None:
        cut = balance(costs, np.int64(2))  # pyright: ignore[reportArgumentType]
        assert cut.stage_costs == (3, 3)
        assert {type(cost) for cost in cut.stage_costs} <= {int, float}


def test_a_thousand_layers() -> None:
    random = np.random.default_rng(0)
    costs, memory = random.random(1000), random.integers(1, 2**30, 1000)
    limit = int(memory.sum()) // 64 * 5 // 4
    free, limited = balance(costs, 64), balance(costs, 64, memory=memory, limits=limit)
    assert len(free.stage_costs) == len(limited.stage_costs) == 64
    assert costs.sum() / 64 < free.largest <= limited.largest
