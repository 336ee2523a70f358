"""Bounds: never above what brute force finds, and as tight as is known."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taktline.errors import CostError, ScheduleError
from taktline.plan import (
    Costs,
    Link,
    Placement,
    bound,
    build,
    lower,
    names,
    simulate,
)
from tests.plan.brute_force import least_times
from tests.plan.strategies import costs as any_costs
from tests.plan.strategies import shapes

FACTS = Path(__file__).parent / "facts" / "v_schedules_unit_cost.csv"
ROWS = list(csv.DictReader(FACTS.read_text("utf-8").splitlines()))

PLACEMENTS = [
    (Placement.linear(1), 4),
    (Placement.linear(2), 4),
    (Placement.linear(3), 3),
    (Placement.v(1), 2),
    (Placement.v(2), 2),
    (Placement.loop(2), 2),
    (Placement.v(3), 1),
    (Placement.loop(3), 1),
    (Placement.custom([0, 1, 1]), 2),
]
"""With the most micro-batches that brute force manages in a moment."""


@st.composite
def instances(draw: st.DrawFn) -> tuple[Placement, int, dict[str, Any], list[float]]:
    """(placement, micro-batches, costs, memory), in quarters, so that sums are exact."""
    placement, most = draw(st.sampled_from(PLACEMENTS))
    quarters = st.integers(1, 10).map(lambda n: n / 4)

    def per_stage() -> list[float]:
        return draw(st.lists(quarters, min_size=placement.stages, max_size=placement.stages))

    whole = per_stage() if draw(st.booleans()) else [1.0] * placement.stages
    part = draw(st.sampled_from([1.0, 0.5, 0.0]))
    least = [
        sum(whole[stage] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)
    ]
    factors = st.sampled_from([1.0, 1.25, 1.5, 2.0, 4.0])
    costs: dict[str, Any] = {
        "forward": per_stage(),
        "backward_input": per_stage(),
        "backward_weight": per_stage(),
        "latency": draw(st.sampled_from([0.0, 0.25, 1.0])),
        "activation": whole,
        "kept_for_weight": [part * memory for memory in whole],
    }
    return placement, draw(st.integers(1, most)), costs, [each * draw(factors) for each in least]


@settings(max_examples=100)
@given(instances())
def test_no_plan_is_below(
    instance: tuple[Placement, int, dict[str, Any], list[float]],
) -> None:
    placement, microbatches, given, memory = instance
    numbers = dict(given)
    names = {"F": "forward", "I": "backward_input", "W": "backward_weight"}
    makespan, span = least_times(
        placement.rank_of,
        microbatches,
        {kind: numbers[name] for kind, name in names.items()},
        numbers["latency"],
        numbers["activation"],
        numbers["kept_for_weight"],
        memory,
    )
    costs = Costs(link=Link(latency=numbers.pop("latency")), **numbers)
    found = bound(costs, placement=placement, microbatches=microbatches, memory=memory)
    assert found.makespan <= makespan
    assert found.span <= span
    busy = microbatches * sum(sum(numbers[name]) for name in names.values())
    assert found.bubble == pytest.approx(1 - busy / placement.ranks / found.span)


@settings(max_examples=60)
@given(st.data())
def test_no_schedule_is_below(data: st.DataObject) -> None:
    """Also with pairs, whole backwards that cost less than their halves, and slow messages."""
    plan = data.draw(shapes(4, 6).filter(lambda plan: plan.name != "forward_only"))
    timeline = simulate(plan, data.draw(any_costs(plan.stages)))
    least = timeline.bound
    assert least is not None
    assert least.makespan <= timeline.makespan + 1e-9
    assert least.span <= timeline.cost("span") + 1e-9
    assert least.bubble <= timeline.bubble("span") + 1e-9
    assert least.bubble_of_makespan <= timeline.bubble() + 1e-9


PAPER = Costs(
    forward=18.522, backward_input=18.086, backward_weight=9.337, link=Link(latency=0.601)
)


@pytest.mark.parametrize("memory", [3, 5, 8, 12, 14])
def test_the_wait_for_the_first_backward(memory: int) -> None:
    """The bound of the paper on Zero Bubble schedules, appendix B, for one stage per rank."""
    costs = replace(PAPER, kept_for_weight=0.0)
    found = bound(costs, ranks=8, microbatches=64, memory=memory)
    idle = 7 * (18.086 + 2 * 0.601) + (8 - memory) * 18.522
    assert found.span >= 64 * (18.522 + 18.086 + 9.337) + idle - 1e-6


@pytest.mark.parametrize("name", ["zb_h1", "interleaved_zero_bubble"])
@pytest.mark.parametrize("size", [(2, 4), (4, 8), (8, 24), (3, 12)])
def test_schedules_that_are_as_good_as_can_be(name: str, size: tuple[int, int]) -> None:
    """At unit costs, no plan in the memory of these has a shorter step: a proof for both."""
    ranks, microbatches = size
    timeline = simulate(build(name, ranks=ranks, microbatches=microbatches))
    assert timeline.bound is not None
    assert timeline.bound.makespan == timeline.makespan


def test_zero_bubble() -> None:
    timeline = simulate(build("zbv", ranks=4, microbatches=8))
    assert timeline.bound is not None
    assert (timeline.bound.bubble, timeline.bubble("span")) == (0.0, 0.0)
    assert timeline.bound.proven == "rank 0: its work"


@pytest.mark.parametrize("row", ROWS)
def test_plans_that_others_have_found(row: dict[str, str]) -> None:
    ranks, microbatches, memory, bubble = map(int, row.values())
    found = bound(Costs(), ranks=ranks, microbatches=microbatches, memory=memory, placement="v")
    assert found.span <= 6 * microbatches + bubble


def test_more_memory_is_no_worse() -> None:
    spans = [
        bound(PAPER, ranks=8, microbatches=24, memory=memory).span for memory in (1, 2, 4, 8, 16)
    ]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > spans[1] > spans[2] > spans[3] > spans[4]
    assert spans[-1] >= bound(PAPER, ranks=8, microbatches=24).span


def test_memory_by_rank_and_sums_that_are_rounded() -> None:
    costs = Costs(activation=0.1)
    one = bound(costs, ranks=2, microbatches=4, memory=0.3)
    assert one == bound(costs, ranks=2, microbatches=4, memory=[0.1 + 0.1 + 0.1, 0.3])
    assert one == bound(Costs(), ranks=2, microbatches=4, memory=3)


def test_a_timeline_knows_its_bound() -> None:
    timeline = simulate(build("1f1b", ranks=4, microbatches=8))
    assert timeline.bound == bound(Costs(), ranks=4, microbatches=8, memory=4)
    assert timeline.verdict == "bubble 27.3%; no plan at this memory is below 11.1%"
    assert simulate(lower(timeline.plan)).bound == timeline.bound
    assert simulate(build("forward_only", ranks=2, microbatches=3)).bound is None
    assert simulate(build("forward_only", ranks=1, microbatches=3)).verdict == "bubble 0.0%"
    assert "forward_only" in names()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"memory": 0.5}, ScheduleError, "no plan fits into memory 0.5 on rank 0: .* needs 1;"),
        ({"memory": [4, 4, 4, 0.9]}, ScheduleError, "memory 0.9 on rank 3"),
        ({"memory": [4, 4]}, ScheduleError, "memory is for 2 ranks, but there are 4"),
        ({"memory": float("nan")}, ScheduleError, "memory must be a number from 0 up"),
        ({"memory": -1}, ScheduleError, "memory must be a number from 0 up"),
        ({"memory": "much"}, ScheduleError, "memory must be a number from 0 up"),
        ({"ranks": None}, ScheduleError, "pass ranks, or a Placement"),
        ({"ranks": 0}, ScheduleError, "ranks must be a whole number from 1"),
        ({"microbatches": 0}, ScheduleError, "microbatches must be a whole number from 1"),
        ({"placement": "w"}, ScheduleError, "placement is one of linear, v, looped, not 'w'"),
        ({"placement": Placement.v(2)}, ScheduleError, "the placement is for 2 ranks, not 4"),
        ({"stages_per_rank": 0}, ScheduleError, "stages_per_rank must be a whole number from 1"),
        ({"costs": None}, CostError, "costs must be a Costs"),
        ({"costs": Costs(forward=(1.0, 2.0))}, CostError, "forward is for 2 stages"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"costs": Costs(), "ranks": 4, "microbatches": 8, **change}
    with pytest.raises(error, match=message):
        bound(given.pop("costs"), **given)
