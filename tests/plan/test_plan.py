"""A plan: immutable, comparable, and built from actions with clear errors; its placement."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from taktline.errors import PlanError
from taktline.plan import Level, Placement, Plan, build
from tests.plan.strategies import any_plan


@given(any_plan())
def test_actions_make_the_same_plan_again(plan: Plan) -> None:
    actions = [plan[rank] for rank in range(plan.ranks)]
    again = Plan.from_actions(actions, plan.placement, plan.microbatches, level=plan.level)
    assert again == plan
    assert hash(again) == hash(plan)
    assert len(plan) == sum(map(len, actions))


@given(any_plan())
def test_a_plan_goes_to_other_processes(plan: Plan) -> None:
    for again in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert again == plan
        assert (again.name, again.level) == (plan.name, plan.level)
        with pytest.raises(AttributeError, match="a plan does not change"):
            again.name = "another"


def test_what_is_not_given_is_read_off_the_actions() -> None:
    plan = Plan.from_actions([["0F0", "0F1", "3F0", "3F1"], ["1F0", "1F1", "2F0", "2F1"]])
    assert plan.placement == Placement.v(2)
    assert (plan.microbatches, plan.level) == (2, Level.COMPUTE)


@pytest.mark.parametrize(
    ("cell", "level"),
    [("0F0", Level.COMPUTE), ("0UNSHARD", Level.SHARDED), ("0SEND_F0", Level.LOWERED)],
)
def test_the_level_is_what_the_actions_need(cell: str, level: Level) -> None:
    assert Plan.from_actions([["0F0", cell]]).level is level


def test_a_level_can_be_claimed_only_upwards() -> None:
    assert Plan.from_actions([["0F0"]], level=Level.LOWERED).level is Level.LOWERED
    with pytest.raises(PlanError, match="a COMPUTE plan may not contain UNSHARD"):
        Plan.from_actions([["0UNSHARD", "0F0"]], level=Level.COMPUTE)


def test_does_not_change() -> None:
    with pytest.raises(ValueError, match="read-only"):
        build("1f1b", ranks=2, microbatches=2).rows.stage[0] = 1


def test_differs_by_order_level_placement_and_number() -> None:
    plans = [
        Plan.from_actions([["0F0", "1F0"]]),
        Plan.from_actions([["1F0", "0F0"]]),
        Plan.from_actions([["0F0", "1F0"]], level=Level.LOWERED),
        Plan.from_actions([["0F0", "1F0"], []]),
        Plan.from_actions([["0F0", "1F0"]], microbatches=2),
        Plan.from_actions([["(0F0;1B0)OVERLAP_F_B"]], Placement.loop(1, 2)),
        Plan.from_actions([["0F0", "1B0"]], Placement.loop(1, 2)),
    ]
    assert len({plan.digest() for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([], "without actions"),
        ([[], []], "without actions"),
        ([["1F0"]], "no rank computes stage 0"),
        ([["0F0", "2F0"]], "no rank computes stage 1"),
        ([["0F0", "2000000000F0"]], "no rank computes stage 1"),
        ([["0UNSHARD"]], "no rank computes stage 0"),
        ([["0F99999999999"]], "from 0 to 2,147,483,647"),
        ([[7]], "an action is an Action, an Overlap or a text, not 7"),
    ],
)
def test_actions_that_make_no_plan(actions: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_actions(actions)


def test_ranks_must_match_the_placement() -> None:
    with pytest.raises(PlanError, match=r"3 ranks, but there are actions for 2"):
        Plan.from_actions([["0F0"], ["1F0"]], Placement.linear(3))


@pytest.mark.parametrize("rank", [2, -3])
def test_a_rank_that_is_not_there(rank: int) -> None:
    for get in (build("1f1b", ranks=2, microbatches=2).__getitem__, Placement.v(2).stages_of):
        with pytest.raises(IndexError, match=f"there is no rank {rank}, only 2 ranks from 0 on"):
            get(rank)


@pytest.mark.parametrize("style", ["loop", "v"])
def test_placements_equal_torchs(style: str) -> None:
    for ranks, stages_per_rank in product(range(1, 7), range(1, 5)):
        placement = getattr(Placement, style)(ranks, stages_per_rank)
        expected = generate_stage_to_rank_mapping(ranks, ranks * stages_per_rank, style)
        assert dict(enumerate(placement.rank_of)) == expected
        held = [placement.stages_of(rank) for rank in range(ranks)]
        assert held == [tuple(s for s in expected if expected[s] == r) for r in range(ranks)]


@pytest.mark.parametrize(
    ("rank_of", "ranks", "message"),
    [
        ([], None, "the number of stages must be a whole number from 1 "),
        ([0] * (2**20 + 1), 1, "the number of stages must be a whole .* to 1,048,576, not 1048577"),
        ([0, 2], 2, "stage 1 is placed on rank 2 of 2"),
        ([0, -1], 2, "stage 1 is placed on rank -1"),
        ([0], 0, "ranks must be a whole number from 1 "),
    ],
)
def test_placements_that_cannot_be(rank_of: list[int], ranks: int | None, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Placement.custom(rank_of, ranks)
