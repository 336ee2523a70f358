"""The text grid: one row a rank, to scale, and never wider than asked."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taktline.plan import Costs, Plan, build, lower, simulate
from taktline.render.text import chart, grid, legend
from tests.plan.strategies import any_plan


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        (
            lower(build("gpipe", ranks=2, microbatches=1)),
            [
                "gpipe: 2 ranks × 1 stage, 1 micro-batch, lowered, in order",
                "rank 0 │ 0F0      0SEND_F0 0RECV_B0 0B0",
                "rank 1 │ 1RECV_F0 1F0      1B0      1SEND_B0",
            ],
        ),
        (
            Plan.from_actions([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]]),
            ["custom: 1 rank × 1 stage, 2 micro-batches", "rank 0 │ 0F0 0F1&0B0──── 0B1────"],
        ),
        (  # which cannot run
            Plan.from_actions([["0B0", "0F0"]]),
            ["custom: 1 rank × 1 stage, 1 micro-batch", "rank 0 │ 0B0 0F0"],
        ),
    ],
)
def test_grids(plan: Plan, rows: list[str]) -> None:
    assert grid(plan, width=80).splitlines() == rows


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


class TestChart:
    def lines(self, width: int = 100, name: str = "1f1b") -> list[str]:
        return chart([simulate(build(name, ranks=4, microbatches=8))], width).splitlines()

    @pytest.mark.parametrize("width", [40, 80, 100, 120, 200])
    def test_fits_the_width_and_is_to_scale(self, width: int) -> None:
        lines = self.lines(width)
        assert (
            lines[0]
            == "1f1b: makespan 33, bubble 27.3% (no plan below 11.1%), peak memory 4 micro-batches"
        )
        assert max(map(len, lines[1:])) <= width
        room = width - len("rank 0 │ ") - 1
        last_rank = lines[4][len("rank 0 │ ") :]
        assert abs(last_rank.index("F") - 3 / 33 * room) <= 1
        assert abs(len(last_rank.rstrip("· ")) - 27 / 33 * room) <= 2

    def test_a_number_at_the_very_end_does_not_stick_out(self) -> None:
        plan = build("gpipe", ranks=1, microbatches=1)
        lines = chart([simulate(plan, Costs(forward=50.0, backward=50.0))], 80).splitlines()
        assert max(map(len, lines)) <= 80
        assert lines[-1].split() == ["0", "20", "40", "60", "80"]

    def test_all_boxes_have_labels_of_one_form(self) -> None:
        assert "0F0 0F1 0F2" in self.lines(200)[1].replace("─", "")
        assert "F0 F1 F2" in self.lines(120)[1].replace("─", "")
        assert set(self.lines(60)[1][9:]) <= set("FB─· ")

    def test_a_measured_idle_plan_has_no_length(self) -> None:
        zero = Costs(forward=0.0, backward_input=0.0, backward_weight=0.0)
        assert "makespan 0" in chart([simulate(build("gpipe", ranks=1, microbatches=1), zero)], 60)


def test_colour_adds_nothing_but_colour() -> None:
    plan = build("zbv", ranks=2, microbatches=3)
    plain, painted = (chart([simulate(plan)], 80, colour=colour) for colour in (False, True))
    assert painted.count("\x1b[") > 20
    bare = re.sub(r"\x1b\[[0-9;]*m", "", painted)
    assert [line.rstrip() for line in bare.splitlines()] == plain.splitlines()
    assert "\x1b" in legend(colour=True)
    assert "\x1b" not in legend()
