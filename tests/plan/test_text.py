"""The text grid: one row a rank, to scale, and never wider than asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taktline.plan import Plan, build, lower
from taktline.plan.render.text import grid
from tests.plan.strategies import any_plan


def test_to_scale() -> None:
    assert grid(build("1f1b", ranks=2, microbatches=2), width=80).splitlines() == [
        "1f1b: 2 ranks × 1 stage, 2 micro-batches",
        "rank 0 │ 0F0 0F1         0B0────     0B1────",
        "rank 1 │     1F0 1B0──── 1F1 1B1────",
    ]


def test_a_pair_is_one_box() -> None:
    plan = Plan.from_actions([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]])
    assert grid(plan, width=80).splitlines()[1] == "rank 0 │ 0F0 0F1&0B0──── 0B1────"


def test_a_lowered_plan_is_listed_in_order() -> None:
    plan = lower(build("gpipe", ranks=2, microbatches=1))
    assert grid(plan, width=80).splitlines() == [
        "gpipe: 2 ranks × 1 stage, 1 micro-batch, lowered, in order",
        "rank 0 │ 0F0      0SEND_F0 0RECV_B0 0B0",
        "rank 1 │ 1RECV_F0 1F0      1B0      1SEND_B0",
    ]


def test_a_plan_that_cannot_run_is_listed_in_order() -> None:
    assert grid(Plan.from_actions([["0B0", "0F0"]]), width=80).endswith("rank 0 │ 0B0 0F0")


@given(any_plan(), st.integers(40, 200))
def test_fits_the_width(plan: Plan, width: int) -> None:
    rows = [line for line in grid(plan, width).splitlines() if line.startswith("rank")]
    assert max(map(len, rows)) <= width


def test_goes_on_in_further_blocks() -> None:
    lines = grid(build("gpipe", ranks=2, microbatches=8), width=60).splitlines()
    assert lines[3] == ""
    wide = grid(build("gpipe", ranks=2, microbatches=8), width=1000).splitlines()
    joined = [lines[1 + rank][9:].ljust(48) + lines[4 + rank][9:].ljust(48) for rank in (0, 1)]
    for rank in (0, 1):
        assert wide[1 + rank][9:].startswith(joined[rank].rstrip())


def test_a_huge_plan_stays_readable() -> None:
    text = grid(build("gpipe", ranks=100, microbatches=200), width=100)
    assert len(text.splitlines()) < 300
    assert "steps more; write the plan to a .csv or .json file to see all" in text
    assert text.endswith("… 36 ranks more")


def test_print_uses_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert max(map(len, str(build("gpipe", ranks=2, microbatches=8)).splitlines())) <= 50
