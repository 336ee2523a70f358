"""Validation: every violation at once, each with rank, position, action and a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from taktline.errors import InvalidPlanError, PlanError
from taktline.plan import (
    Action,
    Kind,
    Level,
    Placement,
    Plan,
    Violation,
    build,
    find,
    lower,
    names,
    require_valid,
    simulate,
    validate,
)
from taktline.plan.validate import Sends
from tests.plan.brute_force import is_valid
from tests.plan.peer import DEFERS, lowered_order
from tests.plan.strategies import LEVELS, any_plan, at_level, shapes

MODES: tuple[Sends, ...] = ("blocking", "asynchronous")


def only(violations: Sequence[Violation]) -> Violation:
    assert len(violations) == 1, violations
    return violations[0]


def where(violation: Violation) -> tuple[str, int | None, int | None, str]:
    return violation.rule, violation.rank, violation.position, str(violation.action)


PAIR = "(0F1;0B0)OVERLAP_F_B"
AWAY = ["0F0", "0OFFLOAD0"]
SENT, RECEIVED = ["0F0", "0SEND_F0"], ["1RECV_F0", "1F0"]

BROKEN: list[tuple[list[list[str]], tuple[str, int, int | None, str], str]] = [
    ([["0B0"]], ("missing", 0, None, "0F0"), "is not in the plan"),
    ([["0F0", "0F0", "0B0"]], ("duplicate", 0, 1, "0F0"), "done before, rank 0, position 0"),
    ([["0B0", "0F0"]], ("order", 0, 0, "0B0"), "0F0, which comes later (rank 0, position 1)"),
    ([["0F0", "0W0", "0I0"]], ("order", 0, 1, "0W0"), "needs 0I0, which comes later"),
    ([["1F0", "0F0", "1B0", "0B0"]], ("order", 0, 0, "1F0"), "needs 0F0, which comes later"),
    ([["0F0", "1F0", "0B0", "1B0"]], ("order", 0, 2, "0B0"), "needs 1B0, which comes later"),
    ([["(0F0;0B0)OVERLAP_F_B"]], ("order", 0, 0, "0B0"), "needs 0F0, which runs together with it"),
    ([["0F0", PAIR, "0B1", "0B1"]], ("duplicate", 0, 3, "0B1"), "done before"),
    ([["0F0"], RECEIVED], ("partner", 1, 0, "1RECV_F0"), "rank 0 has no 0SEND_F0 for it"),
    ([["0F0", "0OFFLOAD0", "0B0"]], ("missing", 0, None, "0RELOAD0"), "0OFFLOAD0 needs it"),
    ([["0F0", "0RELOAD0", "0B0"]], ("missing", 0, None, "0OFFLOAD0"), "0RELOAD0 needs it"),
    ([[*AWAY, "0B0", "0RELOAD0"]], ("order", 0, 2, "0B0"), "needs 0RELOAD0, which comes later"),
    ([["0F0", "0RELOAD0", "0OFFLOAD0", "0B0"]], ("order", 0, 1, "0RELOAD0"), "needs 0OFFLOAD0"),
    ([["0OFFLOAD0", "0F0", "0RELOAD0", "0I0", "0W0"]], ("order", 0, 0, "0OFFLOAD0"), "needs 0F0"),
    ([[*AWAY, "0OFFLOAD0", "0RELOAD0", "0B0"]], ("duplicate", 0, 2, "0OFFLOAD0"), "done before"),
    ([["0F0", "0B0", "0RECOMPUTE0"]], ("order", 0, 1, "0B0"), "needs 0RECOMPUTE0"),
    ([["0F0", "0RECOMPUTE0"]], ("kept", 0, 1, "0RECOMPUTE0"), "no B or I of the plan needs it"),
    (
        [[*AWAY, "0RECOMPUTE0", "0RELOAD0", "0B0"]],
        ("kept", 0, 2, "0RECOMPUTE0"),
        "is reloaded too, rank 0, position 3: leave one out",
    ),
    ([SENT, ["1F0"]], ("partner", 0, 1, "0SEND_F0"), "rank 1 has no 1RECV_F0 for it"),
    ([SENT], ("partner", 0, 1, "0SEND_F0"), "stage 0 has no neighbour on that side"),
    ([["0RECV_F0", "0F0"]], ("partner", 0, 0, "0RECV_F0"), "stage 0 has no neighbour on that"),
    ([[*SENT, "1F0"]], ("partner", 0, 1, "0SEND_F0"), "is on the same rank: leave it out"),
    ([SENT, ["1F0", "1RECV_F0"]], ("order", 1, 0, "1F0"), "needs 1RECV_F0, which comes later"),
    ([["0SEND_F0", "0F0"], RECEIVED], ("order", 0, 0, "0SEND_F0"), "needs 0F0, which comes later"),
    (
        [
            ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0F2", "0SEND_F2"],
            ["1RECV_F0", "1RECV_F2", "1RECV_F1", "1F0", "1F1", "1F2"],
        ],
        ("channel", 0, 5, "0SEND_F2"),
        "is sent after 0SEND_F1, but rank 1 posts 1RECV_F2 (position 1) before 1RECV_F1",
    ),
    ([["0F0", "0UNSHARD"]], ("shard", 0, 0, "0F0"), "stage 0 is not unsharded here"),
    ([["0RESHARD", "0UNSHARD", "0F0"]], ("shard", 0, 0, "0RESHARD"), "not unsharded here"),
    ([["0UNSHARD", "0UNSHARD", "0F0"]], ("shard", 0, 1, "0UNSHARD"), "unsharded already"),
    ([["0UNSHARD", "0RESHARD", "0F0"]], ("shard", 0, 2, "0F0"), "not unsharded here"),
    ([["0F0", "0REDUCE_GRAD", "0B0"]], ("order", 0, 1, "0REDUCE_GRAD"), "comes before 0B0"),
    ([["0F0", "0B0", *["0REDUCE_GRAD"] * 2]], ("duplicate", 0, 3, "0REDUCE_GRAD"), "done before"),
    (
        [["0F0", "1F0", "1B0", "0B0", "0REDUCE_GRAD"]],
        ("missing", 0, None, "1REDUCE_GRAD"),
        "is not in the plan",
    ),
]


@pytest.mark.parametrize(("ranks", "expected", "message"), BROKEN)
def test_one_broken_rule(
    ranks: list[list[str]], expected: tuple[str, int, int | None, str], message: str
) -> None:
    violation = only(validate(Plan.from_actions(ranks)))
    assert where(violation) == expected
    assert message in violation.message


@pytest.mark.parametrize("ranks", [[SENT, RECEIVED], [["0UNSHARD", "0F0", "0B0"]]])
def test_nothing_is_broken(ranks: list[list[str]]) -> None:
    assert validate(Plan.from_actions(ranks)) == ()


def test_several_broken_rules() -> None:
    found = validate(Plan.from_actions([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1B1"]]))
    assert str(found[0]) == "[missing] rank 1, 1F1: is not in the plan"
    found = validate(Plan.from_actions([["0F0", "0I0", "0F1", "0W1"]]))
    assert [where(v)[3] for v in found] == ["0I1", "0W0"]
    found = validate(Plan.from_actions([["0F0", "0B0", "0I0", "0W0"]]))
    assert [where(v) for v in found] == [("duplicate", 0, 2, "0I0"), ("duplicate", 0, 3, "0W0")]
    found = validate(Plan.from_actions([["0F0", "1F0", "0F1", "0B0"]], Placement.linear(1), 1))
    assert [where(v) for v in found] == [("range", 0, 1, "1F0"), ("range", 0, 2, "0F1")]
    messages = ["the plan has only 1 stage", "the plan has only 1 micro-batch"]
    assert [v.message for v in found] == messages
    found = validate(Plan.from_actions([["0F0", "1F0", "0B0"], ["1B0"]], Placement.linear(2)))
    assert (where(found[0]), found[0].message) == (("rank", 0, 1, "1F0"), "stage 1 is on rank 1")
    found = validate(Plan.from_actions([["0F0"], ["1F0"]], level=Level.LOWERED))
    assert where(only(found)) == ("missing", 0, None, "0SEND_F0")
    assert only(found).message == "rank 1 needs it from rank 0"


class TestDeadlock:
    def test_compute_orders_that_wait_for_each_other(self) -> None:
        plan = Plan.from_actions(
            [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B1", "1B0"]], Placement.linear(2)
        )
        assert validate(plan) == ()
        plan = Plan.from_actions([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
        violation = only(validate(plan))
        assert where(violation) == ("deadlock", 0, 1, "0B0")
        assert violation.message == (
            "rank 0 waits at 0B0 (position 1) for 1B0 of rank 1; "
            "rank 1 waits at 1F1 (position 1) for 0F1 of rank 0"
        )
        assert [(rank, str(a), str(b)) for rank, a, b in violation.cycle] == [
            (0, "0B0", "1B0"),
            (1, "1F1", "0F1"),
        ]

    def test_only_if_sends_block(self) -> None:
        """Two ranks in a V that send to each other before they post their receives."""
        ranks = [
            ["0F0", "0F1", "0SEND_F0", "3RECV_F0", "3F0", "0SEND_F1", "3RECV_F1", "3F1"],
            ["1RECV_F0", "1F0", "2F0", "2SEND_F0", "1RECV_F1", "1F1", "2F1", "2SEND_F1"],
        ]
        plan = Plan.from_actions(ranks)
        assert validate(plan) == ()
        ranks[0][2], ranks[0][3], ranks[0][4:6] = "0SEND_F0", "0SEND_F1", ["3RECV_F0", "3F0"]
        plan = Plan.from_actions(ranks)
        assert validate(plan, sends="asynchronous") == ()
        violation = only(validate(plan, sends="blocking"))
        assert [(rank, str(a), str(b)) for rank, a, b in violation.cycle] == [
            (0, "0SEND_F1", "1RECV_F1"),
            (1, "2SEND_F0", "3RECV_F0"),
        ]

    @pytest.mark.parametrize(
        "order",
        [
            lambda plan: np.zeros(len(plan.rows)),
            lambda plan: np.arange(len(plan.rows)),
            # What waits comes after what it waits for, but not after what is before it on its rank.
            lambda plan: np.select(
                [np.isin(plan.rows.kind, (Kind.RECV_F, Kind.RECV_B)), plan.rows.kind > Kind.W],
                [0, 1],
                2,
            ),
        ],
        ids=["all at once", "rank after rank", "against the ranks' own order"],
    )
    def test_a_forged_proof_is_not_believed(self, order: Callable[[Plan], object]) -> None:
        plan = Plan.from_actions(
            [
                ["0F0", "0F1", "0SEND_F0", "0SEND_F1", "3RECV_F0", "3F0", "3RECV_F1", "3F1"],
                ["1RECV_F0", "1F0", "2F0", "2SEND_F0", "1RECV_F1", "1F1", "2F1", "2SEND_F1"],
            ]
        )
        plan.known["order"] = order(plan)
        assert only(validate(plan)).rule == "deadlock"

    def test_torch_lowers_without_deadlock(self) -> None:
        for name, per_rank in TORCH:
            ranks = lowered_order(name, 4, 8, per_rank)
            assert validate(Plan.from_actions(ranks)) == (), name

    @pytest.mark.skipif(not DEFERS, reason="this torch does not defer receives")
    def test_torch_deferred_receives_pass_with_asynchronous_sends_only(self) -> None:
        for name, per_rank in TORCH:
            plan = Plan.from_actions(lowered_order(name, 4, 8, per_rank, defer=True))
            assert validate(plan, sends="asynchronous") == (), name
            blocking = validate(plan, sends="blocking")
            assert {violation.rule for violation in blocking} == {"deadlock"}, name


TORCH = [
    ("Interleaved1F1B", 2),
    ("LoopedBFS", 2),
    ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
]


def test_a_slip_in_one_number_is_found_at_once() -> None:
    plan = Plan.from_actions([["0F0", "0F2000000000", "0B0"]])
    violation = only(validate(plan))
    assert where(violation) == ("missing", 0, None, "0F2000000000")
    assert "is the number right?" in violation.message


def test_an_unknown_way_to_send() -> None:
    with pytest.raises(PlanError, match="sends is one of"):
        validate(build("1f1b", ranks=1, microbatches=1), sends="pigeon")  # type: ignore[arg-type]


def test_all_violations_are_raised_together() -> None:
    plan = Plan.from_actions([[f"0F{m}" for m in range(30)] * 2], name="twice")
    with pytest.raises(InvalidPlanError) as caught:
        require_valid(plan)
    assert len(caught.value.violations) == 30
    assert "plan 'twice' is not valid: 30 violations" in str(caught.value)
    assert "and 20 more" in str(caught.value)
    with pytest.raises(InvalidPlanError):
        simulate(plan)
    with pytest.raises(InvalidPlanError):
        lower(plan)


@given(any_plan())
def test_every_generated_plan_is_sound_at_every_level(plan: Plan) -> None:
    assert validate(plan) == ()
    assert validate(plan if plan.level == Level.LOWERED else lower(plan)) == ()
    assert simulate(plan).makespan > 0
    assert is_valid(
        [[str(action) for action in plan[rank]] for rank in range(plan.ranks)],
        plan.placement.rank_of,
        plan.microbatches,
        plan.level == Level.LOWERED,
        blocking=True,
    )


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data(), shapes(4, 4), st.sampled_from(LEVELS), st.sampled_from(MODES))
def test_a_changed_plan_is_valid_or_reported(
    data: st.DataObject, plan: Plan, level: str, sends: Sends
) -> None:
    """One action moved, dropped, doubled or renamed: the brute-force check has the last word."""
    plan = at_level(plan, level, data.draw(st.integers(1, 3)))
    ranks = [[str(action) for action in plan[rank]] for rank in range(plan.ranks)]
    _change_one(data, plan, ranks)
    assume(any(ranks))
    try:
        changed = Plan.from_actions(ranks, plan.placement, plan.microbatches, level=plan.level)
    except PlanError:  # an action that does not belong to this level
        sound = False
    else:
        many = data.draw(st.sampled_from([1, 48]))  # the walk of many ranks, too
        with patch.object(sys.modules["taktline.plan.walk"], "_MANY", many):
            sound = validate(changed, sends=sends) == ()
    assert sound == is_valid(
        ranks,
        plan.placement.rank_of,
        plan.microbatches,
        plan.level == Level.LOWERED,
        sends == "blocking",
    )


def _change_one(data: st.DataObject, plan: Plan, ranks: list[list[str]]) -> None:
    rank = data.draw(st.sampled_from([rank for rank, cells in enumerate(ranks) if cells]))
    cells = ranks[rank]
    at = data.draw(st.integers(0, len(cells) - 1))
    change = data.draw(st.sampled_from(["move", "swap", "drop", "double", "rename", "give away"]))
    if change == "move":
        cells.insert(data.draw(st.integers(0, len(cells) - 1)), cells.pop(at))
    elif change == "swap":
        other = data.draw(st.integers(0, len(cells) - 1))
        cells[at], cells[other] = cells[other], cells[at]
    elif change == "drop":
        del cells[at]
    elif change == "double":
        cells.insert(data.draw(st.integers(0, len(cells))), cells[at])
    elif change == "rename":
        kind = data.draw(st.sampled_from(Kind))
        stage = data.draw(st.integers(0, plan.stages))
        number = data.draw(st.integers(0, plan.microbatches)) if kind.has_microbatch else None
        cells[at] = str(Action(stage, kind, number))
    else:
        receiver = data.draw(st.sampled_from(ranks))
        receiver.insert(data.draw(st.integers(0, len(receiver))), cells.pop(at))


@pytest.mark.parametrize("name", names())
def test_a_lowered_plan_has_a_proof_with_the_result_of_the_walk(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lowered plan carries its proof; without it, the walk comes to the same answer."""
    schedule = find(name)
    plan = lower(
        build(name, ranks=4, microbatches=6, stages_per_rank=schedule.stages_per_rank), keep_ready=1
    )
    assert "order" in plan.known
    bare = Plan.from_actions(
        [plan[rank] for rank in range(4)], plan.placement, plan.microbatches, level=plan.level
    )
    assert "order" not in bare.known
    assert validate(bare) == ()

    def never(*args: object) -> None:
        pytest.fail("the proof did not hold, so the plan was walked")

    monkeypatch.setattr(sys.modules["taktline.plan.validate"], "walk", never)
    assert validate(plan) == ()
