"""Every schedule: valid for all numbers, as drawn, with the bubble and memory that it states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from taktline.errors import ScheduleError
from taktline.plan import (
    Costs,
    Kind,
    Rows,
    build,
    each_rank,
    find,
    names,
    register,
    simulate,
    unregister,
    validate,
)
from taktline.render.text import grid

DRAWN = {
    "forward_only": (3, 1, 4),
    "gpipe": (3, 1, 4),
    "1f1b": (3, 1, 4),
    "interleaved_1f1b": (2, 2, 2),
    "looped_bfs": (2, 2, 3),
    "zb_h1": (3, 1, 4),
    "zb_h2": (3, 1, 5),
    "interleaved_zero_bubble": (2, 2, 2),
    "zbv": (2, 2, 3),
    "dualpipev": (2, 2, 4),
    "v_half": (4, 2, 4),
    "v_min": (4, 2, 4),
}


def drawing(name: str) -> list[str]:
    """The title and the rows of the drawing in a schedule's docstring."""
    lines = [line.strip() for line in (find(name).generate.__doc__ or "").splitlines()]
    return [line for line in lines if line.startswith((f"{name}:", "rank "))]


@pytest.mark.parametrize("name", names())
def test_is_what_its_docstring_and_the_documentation_draw(name: str) -> None:
    ranks, stages_per_rank, microbatches = DRAWN[name]
    plan = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
    drawn, actual = drawing(name), grid(plan, width=10_000).splitlines()
    assert len(drawn) == len(actual) == ranks + 1
    for line, expected in zip(drawn, actual, strict=True):
        assert line in page
        if line.endswith("…"):
            assert expected.startswith(line[:-1].rstrip())
        else:
            assert expected == line


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("1F1B", "1f1b"),
        ("Schedule1F1B", "1f1b"),
        ("ScheduleInterleaved1F1B", "interleaved_1f1b"),
        ("interleaved-1f1b", "interleaved_1f1b"),
        ("ZBVZeroBubble", "zbv"),
        ("ZB-H1", "zb_h1"),
        ("_ScheduleForwardOnly", "forward_only"),
    ],
)
def test_a_schedule_has_many_names(asked: str, name: str) -> None:
    assert find(asked).name == name


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ScheduleError) as caught:
        find("nonsense")
    assert all(name in str(caught.value) for name in names())
    assert "did you mean" not in str(caught.value)
    with pytest.raises(ScheduleError, match=r"did you mean dualpipev\?"):
        find("dualpipe")


@pytest.mark.parametrize(("name", "asked"), [("1f1b", 2), ("zbv", 1), ("dualpipev", 3)])
def test_stages_per_rank_that_do_not_fit(name: str, asked: int) -> None:
    with pytest.raises(ScheduleError, match=f"per rank, not {asked}") as caught:
        build(name, ranks=4, microbatches=8, stages_per_rank=asked)
    for other in str(caught.value).partition("there are: ")[2].split(", "):
        build(other, ranks=4, microbatches=8, stages_per_rank=asked)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"ranks": 0, "microbatches": 1}, "ranks must be a whole number from 1 to 4,096, not 0"),
        ({"ranks": 2, "microbatches": 0}, "microbatches must be .* from 1 up, not 0"),
        ({"ranks": 2, "microbatches": 2, "stages_per_rank": 0}, "stages_per_rank must be a whole"),
        ({"ranks": 2.5, "microbatches": 2}, r"ranks must be .* not 2\.5"),
    ],
)
def test_numbers_start_at_one(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build("interleaved_1f1b", **numbers)


FWD, INPUT, WEIGHT, KEPT = 1.25, 1.5, 0.75, 0.5
FULL = FWD + INPUT + WEIGHT
UNEVEN = Costs(forward=FWD, backward_input=INPUT, backward_weight=WEIGHT, kept_for_weight=KEPT)

# The numbers of stages per rank and of micro-batches, how the bubble is counted, the bubble divided
# by p-1, and the peak memory on rank r of p for v stages and m micro-batches.
FORMULAS: dict[str, Any] = {
    "forward_only": ((1, 2, 3), lambda p: [2 * p], "makespan", FWD,
        lambda p, r, v, m: 1 / v),
    "gpipe": ((1,), lambda p: [1, p, 3 * p + 1], "makespan", FULL,
        lambda p, r, v, m: m),
    "1f1b": ((1,), lambda p: [1, p, 3 * p + 1], "makespan", FULL,
        lambda p, r, v, m: min(m, p - r)),
    "interleaved_1f1b": ((1, 2, 3), lambda p: [p, 3 * p], "makespan",
        FULL,
        lambda p, r, v, m: min(v * m, (v - 1) * p + 2 * (p - 1 - r) + 1) / v),
    "looped_bfs": ((1, 2, 3), lambda p: [p, 2 * p + 1], "makespan",
        FULL, lambda p, r, v, m: m),
    "zb_h1": ((1,), lambda p: [p, 2 * p + 1], "makespan", FWD + INPUT - WEIGHT,
        lambda p, r, v, m: p - r + r * KEPT),
    "zb_h2": ((1,), lambda p: [2 * p - 1, 3 * p], "span", FWD + INPUT - 2 * WEIGHT,
        lambda p, r, v, m: 2 * p - 2 * r - 1 + 2 * r * KEPT),
    "interleaved_zero_bubble": ((1, 2, 3), lambda p: [p, 3 * p], "makespan",
        FWD + INPUT - WEIGHT, lambda p, r, v, m: ((v - 1) * p + p - r + r * KEPT) / v),
}  # fmt: skip


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
class TestFormulas:
    """The bubble and the memory that each schedule states."""

    @pytest.mark.parametrize("name", FORMULAS)
    def test_table(self, p: int, name: str) -> None:
        per_rank, numbers, by, idle, peak = FORMULAS[name]
        for v in per_rank:
            for m in numbers(p):
                plan = build(name, ranks=p, microbatches=m, stages_per_rank=v)
                timeline = simulate(plan, UNEVEN)
                assert timeline.idle(by) == pytest.approx((p - 1) * idle), (v, m)
                expected = [peak(p, r, v, m) for r in range(p)]
                assert timeline.peak_memory.tolist() == pytest.approx(expected), (v, m)

    def test_zbv(self, p: int) -> None:
        for m in (2 * p - 1, 3 * p):
            timeline = simulate(build("zbv", ranks=p, microbatches=m))
            assert timeline.idle("span") == 0
            assert max(timeline.peak_memory) == min(p, m)

    @pytest.mark.parametrize("overlap", [3.25, 2.5, 2.0])
    def test_dualpipev(self, p: int, overlap: float) -> None:
        costs = Costs(forward=1.25, backward_input=1.25, backward_weight=0.75, overlap=overlap)
        for m in (2 * p, 3 * p + 1):
            timeline = simulate(build("dualpipev", ranks=p, microbatches=m), costs)
            idle_at_turn = timeline.makespan - timeline.busy[-1]
            assert idle_at_turn == pytest.approx((p - 1) * (overlap + 2.0 - 3 * 0.75))
            assert timeline.peak_memory.tolist() == [min(p + 0.5, m)] * p

    @pytest.mark.parametrize(
        ("name", "live"), [("v_min", lambda p: (p + 4) // 3), ("v_half", lambda p: (p + 2) // 2)]
    )
    def test_v_limited(self, p: int, name: str, live: Callable[[int], int]) -> None:
        k = 2 * live(p)
        for m in (1, p, 2 * p, 4 * p + 1):
            timeline = simulate(build(name, ranks=p, microbatches=m))
            assert max(timeline.peak_memory) <= k / 2
            if m >= 2 * p:
                assert timeline.idle("span") <= max(0, 6 * p - 3 * k - 1)


def test_rounds_that_do_not_divide_stay_close_to_those_that_do() -> None:
    """Micro-batches that are no multiple of the ranks cost no more than one extra round."""
    for m in range(4, 24):
        idle = simulate(build("interleaved_1f1b", ranks=4, microbatches=m)).idle()
        assert 9 <= idle <= 9 + 3 * (m % 4), m


def test_registering_a_schedule_makes_it_known() -> None:
    @register("test_lonely", "Test-Alone", stages_per_rank=1)
    @each_rank
    def lonely(rank: int, placement: object, microbatches: int) -> Rows:
        """Each micro-batch alone."""
        kinds = np.tile([Kind.F, Kind.B], microbatches)
        return Rows.of(kinds, rank, np.repeat(np.arange(microbatches), 2))

    try:
        plan = build("test alone", ranks=3, microbatches=2)
        assert plan.name == "test_lonely"
        assert find("test_lonely").summary == "Each micro-batch alone."
        assert validate(plan) == ()
        assert simulate(plan).makespan == 2 * 9
        with pytest.raises(ScheduleError, match="a schedule is called 'test_lonely' already"):
            register("other", "Test-Lonely", stages_per_rank=1)(lonely)
        assert "other" not in names()
    finally:
        unregister("test_lonely")
    with pytest.raises(ScheduleError, match="no schedule is called 'Test-Alone'"):
        find("Test-Alone")
    with pytest.raises(ScheduleError, match="rank_rows must be a function"):
        each_rank("1f1b")  # pyright: ignore
