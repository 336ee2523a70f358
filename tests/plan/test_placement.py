"""Where stages lie."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from taktline.errors import NoSuchRankError, PlanError
from taktline.plan import Placement


@pytest.mark.parametrize("ranks", range(1, 7))
@pytest.mark.parametrize("stages_per_rank", range(1, 5))
@pytest.mark.parametrize("style", ["loop", "v"])
def test_equals_torch(ranks: int, stages_per_rank: int, style: str) -> None:
    placement = getattr(Placement, style)(ranks, stages_per_rank)
    expected = generate_stage_to_rank_mapping(ranks, ranks * stages_per_rank, style)
    assert dict(enumerate(placement.rank_of)) == expected


def test_stages_of_a_rank_are_in_the_order_of_the_model() -> None:
    assert Placement.v(4).stages_of(1) == (1, 6)
    assert Placement.loop(4, 3).stages_of(2) == (2, 6, 10)
    assert Placement.custom([0, 0, 1]).stages_of(0) == (0, 1)


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Placement.linear(4), "linear, 4 stages on 4 ranks"),
        (Placement.loop(2, 2), "loop, 4 stages on 2 ranks"),
        (Placement.v(2), "v, 4 stages on 2 ranks"),
        (Placement.custom([0, 0, 1]), "custom, 3 stages on 2 ranks"),
    ],
)
def test_says_what_it_is(placement: Placement, text: str) -> None:
    assert str(placement) == text


@pytest.mark.parametrize(
    ("rank_of", "ranks", "message"),
    [
        ([], None, "the number of stages must be a whole number from 1 "),
        ([0, 2], 2, "stage 1 is placed on rank 2 of 2"),
        ([0, -1], 2, "stage 1 is placed on rank -1"),
        ([0], 0, "ranks must be a whole number from 1 "),
    ],
)
def test_refuses_what_cannot_be(rank_of: list[int], ranks: int | None, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Placement.custom(rank_of, ranks)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_there_has_no_stages(rank: int) -> None:
    with pytest.raises(NoSuchRankError, match=f"there is no rank {rank}, only 2 ranks from 0 on"):
        Placement.v(2).stages_of(rank)
