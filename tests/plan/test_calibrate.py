"""Costs from timelines: those of a simulation are found again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taktline.errors import CostError
from taktline.plan import Costs, Kind, Link, Plan, Rows, Timeline, build, lower, simulate
from tests.plan.strategies import any_plan, costs, link

NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward_input",
    Kind.W: "backward_weight",
}


@given(st.data(), any_plan())
def test_the_costs_of_a_simulation_are_found_again(data: st.DataObject, plan: Plan) -> None:
    if plan.rows.joined.any():
        with pytest.raises(CostError, match="overlapped pair"):
            Costs.from_timeline(simulate(plan))
        return
    # A message has no size here: one latency could not tell it from the link's own.
    alike = {"message_bytes": 0.0, "link": data.draw(link())}
    known = replace(data.draw(costs(plan.stages)), **alike, unit="ms")
    timeline = simulate(plan, known)
    found = Costs.from_timeline(timeline)
    rows = timeline.plan.rows
    for kind, name in NAMES.items():
        stages = np.unique(rows.stage[rows.kind == kind])
        expected, actual = (each.of(name, plan.stages)[stages] for each in (known, found))
        np.testing.assert_allclose(actual, expected, atol=1e-9)
    assert isinstance(found.link, Link)
    assert isinstance(known.link, Link)
    if len(timeline.messages()[0]):
        assert found.link.latency == pytest.approx(known.link.latency)
    assert found.unit == "ms"
    again = simulate(plan, found)
    np.testing.assert_allclose(again.start, timeline.start, atol=1e-9)
    np.testing.assert_allclose(again.end, timeline.end, atol=1e-9)


def test_what_was_not_measured_is_guessed() -> None:
    """Halves of a backward share it evenly; without any backward, each takes a forward's time."""
    timeline = simulate(build("1f1b", ranks=2, microbatches=4), Costs(backward=3.0))
    found = Costs.from_timeline(timeline)
    assert found.backward == (3.0, 3.0)
    assert found.backward_input == found.backward_weight == (1.5, 1.5)
    plan = build("forward_only", ranks=2, microbatches=4, stages_per_rank=1)
    found = Costs.from_timeline(simulate(plan, Costs(forward=(1.0, 3.0))))
    assert found.forward == found.backward_input == found.backward_weight == (1.0, 3.0)
    assert found.backward is None


def test_a_stage_without_halves_uses_the_ratio_of_the_others() -> None:
    """Stage 1 has no halves here, and stage 0 no whole."""
    plan = Plan.from_actions([["0F0", "0I0", "0W0"], ["1F0", "1B0"]])
    known = Costs(backward_input=3.0, backward_weight=1.0, backward=(4.0, 8.0))
    found = Costs.from_timeline(simulate(plan, known))
    assert found.backward_input == (3.0, 6.0)
    assert found.backward_weight == (1.0, 2.0)
    assert found.backward == (4.0, 8.0)


def test_one_disturbed_step_of_three_does_not_count() -> None:
    plan = build("zb_h1", ranks=2, microbatches=3)
    calm, disturbed = (simulate(plan, Costs(forward=time)) for time in (1.0, 50.0))
    assert Costs.from_timeline(calm, disturbed, calm).forward == (1.0, 1.0)
    with pytest.raises(CostError, match="of one model"):
        Costs.from_timeline(calm, simulate(build("1f1b", ranks=3, microbatches=2)))


def test_what_a_rank_spends_between_actions_is_a_cost() -> None:
    """As measured: sends take their rank's time, and an action begins a little after it could."""
    plan = lower(build("gpipe", ranks=2, microbatches=2))
    assert [str(a) for a in plan[0]][:4] == ["0F0", "0SEND_F0", "0F1", "0SEND_F1"]
    timeline = simulate(plan, Costs(link=Link(latency=1.0)))
    start, end = timeline.start.copy(), timeline.end.copy()
    for row in range(len(plan.rows)):
        leaf = plan.rows.leaf(row)
        if leaf.kind == Kind.SEND_F:
            end[row] += 0.25
        if str(leaf) == "0F1":
            start[row], end[row] = start[row] + 0.25, end[row] + 0.25
    measured = Timeline(plan, start, end, timeline.costs, timeline.arrival, measured=True)
    assert Costs.from_timeline(measured).of("forward", 2)[0] == pytest.approx((1.0 + 1.25) / 2)


def test_a_message_that_leaves_late_is_not_slow() -> None:
    """A pair that ran as its two halves sends what the first one gave after the second.

    The second half once counted as latency, and predictions for DualPipeV were 11% too high.
    """
    plan = lower(build("dualpipev", ranks=2, microbatches=8))
    by_rank = [plan.rows_of(rank) for rank in range(2)]
    assert plan.rows.joined.any()
    apart = plan.with_rows([Rows.of(r.kind, r.stage, r.microbatch) for r in by_rank], plan.level)
    timeline = simulate(apart, Costs(link=Link(latency=0.25)))
    found = Costs.from_timeline(timeline)
    assert isinstance(found.link, Link)
    assert found.link.latency == pytest.approx(0.25)
    assert simulate(apart, found).makespan == pytest.approx(timeline.makespan)
