"""Lowering: pure passes, each sound by itself, and equal to torch's where torch has one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from inspect import signature
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from taktline.errors import PlanError
from taktline.plan import (
    Level,
    Placement,
    Plan,
    add_comm,
    add_reduce,
    add_shard,
    build,
    lower,
    merge_backward,
    restrict,
    simulate,
    validate,
)
from tests.plan.peer import without_waits
from tests.plan.strategies import any_plan, shapes


def texts(plan: Plan, rank: int) -> list[str]:
    return [str(action) for action in plan[rank]]


def torch_actions(plan: Plan, rank: int) -> list[torch_schedules._Action | None]:
    return [torch_schedules._Action.from_str(text) for text in texts(plan, rank)]


@given(shapes())
def test_passes_leave_their_input_alone_and_always_give_the_same(plan: Plan) -> None:
    before = plan.digest()
    assert lower(plan, merge=True, keep_ready=2, reduce=True) == lower(
        plan, merge=True, keep_ready=2, reduce=True
    )
    assert plan.digest() == before


@given(shapes(), st.booleans(), st.none() | st.integers(1, 3), st.booleans())
def test_lowering_only_adds_to_the_compute_actions(
    plan: Plan, merge: bool, keep_ready: int | None, reduce: bool
) -> None:
    lowered = lower(plan, merge=merge, keep_ready=keep_ready, reduce=reduce)
    assert lowered.level is Level.LOWERED
    assert validate(lowered) == ()
    compute = merge_backward(plan) if merge else plan
    for rank in range(plan.ranks):
        kept = [text for text in texts(lowered, rank) if re.search(r"\d[FBIW]\d", text)]
        assert kept == texts(compute, rank)


@given(shapes())
def test_merging_gives_what_torch_gives(plan: Plan) -> None:
    merged = merge_backward(plan)
    for rank in range(plan.ranks):
        expected = torch_schedules._merge_bw(torch_actions(plan, rank))
        assert texts(merged, rank) == [str(action) for action in expected]
    assert validate(merged) == ()


def test_a_backward_in_an_overlapped_pair_is_not_merged() -> None:
    plan = Plan.from_actions([["0F0", "(0F1;0I0)OVERLAP_F_B", "0W0", "0I1", "0W1"]])
    assert texts(merge_backward(plan), 0) == ["0F0", "(0F1;0I0)OVERLAP_F_B", "0W0", "0B1"]


@given(shapes(4, 6), st.integers(1, 4))
def test_sharding_gives_what_torch_gives(plan: Plan, keep_ready: int) -> None:
    sharded = add_shard(plan, keep_ready)
    for rank in range(plan.ranks):
        try:
            expected = torch_schedules._add_unshard_reshard(torch_actions(plan, rank), keep_ready)
        except ValueError:  # some versions refuse an overlap of two stages
            assume(keep_ready > 1)
            raise
        assert _reshards_sorted(texts(sharded, rank)) == _reshards_sorted(map(str, expected))
    assert validate(sharded) == ()


_AHEAD = "unshard_lookahead" in signature(torch_schedules._add_unshard_reshard).parameters


@pytest.mark.skipif(not _AHEAD, reason="torch has it since 2.15")
@given(shapes(4, 6), st.integers(2, 4), st.data())
def test_gathering_fewer_in_advance_gives_what_torch_gives(
    plan: Plan, keep_ready: int, data: st.DataObject
) -> None:
    numbers = st.lists(st.integers(1, keep_ready), min_size=plan.ranks, max_size=plan.ranks)
    ahead = data.draw(numbers)
    sharded = add_shard(plan, keep_ready, ahead)
    for rank, number in enumerate(ahead):
        add: Any = torch_schedules._add_unshard_reshard
        expected = add(torch_actions(plan, rank), keep_ready, unshard_lookahead=number)
        assert _reshards_sorted(texts(sharded, rank)) == _reshards_sorted(map(str, expected))
    assert validate(sharded) == ()


def test_gathering_fewer_in_advance() -> None:
    plan = Plan.from_actions([["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"]])
    assert " ".join(texts(add_shard(plan, 2, [1]), 0)) == (
        "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 2UNSHARD 2F0 2B0 2RESHARD 1B0 1RESHARD 0UNSHARD 0B0 "
        "0RESHARD"
    )


def _reshards_sorted(cells: Iterable[str]) -> list[str]:
    """Torch releases several stages at once in the order of a set: here, in that of their names."""
    groups: list[list[str]] = [[]]
    for cell in cells:
        if cell.endswith("RESHARD"):
            groups[-1].append(cell)
        else:
            groups += [[cell], []]
    return [cell for group in groups for cell in sorted(group)]


@given(shapes(4, 6))
def test_reducing_gives_what_torch_gives(plan: Plan) -> None:
    reduced = add_reduce(plan)
    for rank in range(plan.ranks):
        expected = torch_schedules._add_reduce_grad(torch_actions(plan, rank), plan.microbatches)
        assert texts(reduced, rank) == without_waits(expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda plan: add_shard(plan, 0), "keep_ready must be a whole number from 1 up, not 0"),
        (lambda plan: add_shard(plan, 2, [1] * 9), "ahead has 9 numbers"),
        (lambda plan: add_shard(plan, 2, [3] * plan.ranks), r"ahead\[0\] must be .* from 1 to 2"),
        (lambda plan: add_shard(add_shard(plan)), "this one is SHARDED"),
        (lambda plan: add_reduce(add_reduce(plan)), "without REDUCE_GRAD"),
        (lambda plan: add_reduce(lower(plan)), "without REDUCE_GRAD"),
        (lambda plan: restrict(plan, 0), "restricted to 1 up to 2 of them, not 0"),
        (lambda plan: restrict(plan, 3), "restricted to 1 up to 2 of them, not 3"),
    ],
)
def test_passes_that_cannot_be_applied(make: Callable[[Plan], Plan], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make(build("interleaved_1f1b", ranks=2, microbatches=2))


class TestCommunication:
    def test_a_receive_is_posted_while_the_sender_still_computes(self) -> None:
        """A post stands before what the receiver does when the message goes out, or in its gap."""
        compute = build("1f1b", ranks=4, microbatches=8)
        spans = [span for rank in range(4) for span in simulate(compute).spans(rank)]
        start, end = ({str(s.action): getattr(s, name) for s in spans} for name in ("start", "end"))
        posts = 0
        for rank in range(4):
            cells = texts(lower(compute), rank)
            for at, cell in enumerate(cells):
                if found := re.fullmatch(r"(\d+)RECV_(.)(\d+)", cell):
                    stage, direction, number = found.groups()
                    sender = int(stage) - 1 if direction == "F" else int(stage) + 1
                    sent = end[f"{sender}{direction}{number}"]
                    before = [c for c in cells[:at] if c in end]
                    following = next(c for c in cells[at:] if c in start)
                    idle = (end[before[-1]] if before else 0) < sent <= start[following]
                    assert idle or start[following] < sent <= end[following], cells
                    posts += 1
        assert posts == 2 * 3 * 8

    def test_only_neighbours_apart_need_messages(self) -> None:
        compute = [["0F0", "1F0", "1B0", "0B0"], ["2F0", "3F0", "3B0", "2B0"]]
        plan = lower(Plan.from_actions(compute, Placement.custom([0, 0, 1, 1])))
        assert texts(plan, 0) == ["0F0", "1F0", "1SEND_F0", "1RECV_B0", "1B0", "0B0"]
        assert texts(plan, 1) == ["2RECV_F0", "2F0", "3F0", "3B0", "2B0", "2SEND_B0"]
        assert add_comm(plan) is plan


class TestRestriction:
    @given(any_plan(), st.data())
    def test_a_part_of_a_valid_plan_is_valid_and_in_order(
        self, plan: Plan, data: st.DataObject
    ) -> None:
        count = data.draw(st.integers(1, plan.microbatches))
        part = restrict(plan, count)
        facts = (part.microbatches, part.placement, part.level)
        assert facts == (count, plan.placement, plan.level)
        assert validate(part) == ()
        by_rank = [part.rows_of(rank) for rank in range(part.ranks)]
        assert validate(part.with_rows(by_rank, part.level)) == ()  # without the order it inherits
        for rank in range(plan.ranks):
            rows = plan.rows_of(rank)
            leaves = [rows.leaf(row) for row in range(len(rows))]
            rest = part.rows_of(rank)
            assert [rest.leaf(row) for row in range(len(rest))] == [
                leaf for leaf in leaves if leaf.microbatch is None or leaf.microbatch < count
            ]

    @pytest.mark.parametrize("name", ["gpipe", "1f1b", "looped_bfs", "zb_h1", "zb_h2"])
    def test_where_each_micro_batch_does_the_same_it_is_the_plan_of_fewer(self, name: str) -> None:
        for ranks, count in product((1, 2, 4), range(1, 9)):
            whole = build(name, ranks=ranks, microbatches=8)
            assert restrict(whole, count) == build(name, ranks=ranks, microbatches=count)

    def test_half_a_pair_is_left(self) -> None:
        plan = Plan.from_actions([["0F0", "(0F1;0B0)OVERLAP_F_B", "(0F2;0B1)OVERLAP_F_B", "0B2"]])
        assert texts(restrict(plan, 2), 0) == ["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]
        assert texts(restrict(plan, 1), 0) == ["0F0", "0B0"]
