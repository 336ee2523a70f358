"""The seven schedules that torch ships: our compute actions equal torch's, rank by rank."""

from __future__ import annotations

import pytest

from taktline.plan import Plan, build
from tests.plan.peer import compute_order, recorded_order

RANKS, MICROBATCHES = (1, 2, 3, 4, 5, 6, 8), range(1, 25)


def texts(plan: Plan) -> list[list[str]]:
    return [[str(action) for action in plan[rank]] for rank in range(plan.ranks)]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "stages_per_rank", "compared"),
    [
        ("Interleaved1F1B", (1, 2, 3), 354),
        ("LoopedBFS", (1, 2, 3), 504),
        ("InterleavedZeroBubble", (1, 2, 3), 354),
        ("ZBVZeroBubble", (2,), 168),
        ("DualPipeV", (2,), 117),
    ],
)
def test_order_that_torch_writes_down(
    name: str, stages_per_rank: tuple[int, ...], compared: int
) -> None:
    count = 0
    for ranks in RANKS:
        for microbatches in MICROBATCHES:
            for per_rank in stages_per_rank:
                expected = compute_order(name, ranks, microbatches, per_rank)
                if expected is not None:
                    plan = build(
                        name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank
                    )
                    assert texts(plan) == expected, (ranks, microbatches, per_rank)
                    count += 1
    assert count == compared


@pytest.mark.parametrize(("name", "compared"), [("GPipe", 168), ("1F1B", 146)])
def test_order_that_torch_runs(name: str, compared: int) -> None:
    count = 0
    for ranks in RANKS:
        for microbatches in MICROBATCHES:
            expected = recorded_order(name, ranks, microbatches)
            if expected is not None:
                assert texts(build(name, ranks=ranks, microbatches=microbatches)) == expected
                count += 1
    assert count == compared
