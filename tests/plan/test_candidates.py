"""Costs of units from timelines, ranks that share cores, cuts, and plans to choose from."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

import numpy as np
import pytest

from taktline.errors import ScheduleError
from taktline.plan import (
    Costs,
    Link,
    Placement,
    Plan,
    Timeline,
    build,
    lower,
    peak_memory,
    simulate,
    validate,
)
from taktline.plan.candidates import candidates, cut, described, with_measured
from taktline.plan.rows import FloatArray
from taktline.plan.sharing import predict, work
from taktline.plan.units import (
    Units,
    _in_turns,
    contiguous,
    measured,
    one_by_one,
    with_overhead,
)

TIMES = np.array([[1.0, 2, 3, 1], [2.0, 5, 6, 2], [1.2, 3, 3, 1], [1.0, 2.5, 3, 1.3]])
BOUNDS = (0, 2, 4)


def costs(times: FloatArray = TIMES) -> Costs:
    forward, backward, inputs, weights = map(tuple, times.tolist())
    halves: Any = {"backward_input": inputs, "backward_weight": weights}
    return Costs(forward=forward, backward=backward, **halves, unit="ms")


def steps(cores: float) -> tuple[list[Timeline], list[Timeline]]:
    """What is measured: a step of single ranks, and one of all together."""
    plan = contiguous(2, BOUNDS, 6)
    # In a trace an I and its W run one after the other.
    return [simulate(one_by_one(plan.placement, 4), costs())], [predict(plan, costs(), cores)]


@pytest.mark.parametrize("cores", [math.inf, 1.0, 1.5])
def test_costs_and_cores_are_found_again(cores: float) -> None:
    units = measured(*steps(cores))
    assert units.cores == pytest.approx(cores, abs=1e-3)
    np.testing.assert_allclose(units.times, TIMES, rtol=1e-3)
    other = build("zb_h1", ranks=2, microbatches=5)
    known = Units(TIMES).costs(BOUNDS, other.placement)
    found = units.costs(BOUNDS, other.placement)
    expected = predict(other, known, cores).makespan
    assert predict(other, found, units.cores).makespan == pytest.approx(expected, rel=1e-3)


def test_ranks_that_spin() -> None:
    """The second rank ends at 7, so the first runs its last backward twice as fast."""
    plan = Plan.from_actions([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    known = Costs(forward=1.0, backward=2.0)
    timeline = predict(plan, known, spinning=True)
    assert timeline.start.tolist() == [0, 1, 4, 7, 1, 2, 4, 5]
    assert timeline.end.tolist() == [1, 2, 6, 8, 2, 4, 5, 7]
    assert work(timeline, spinning=True).tolist() == [1, 1, 2, 2, 1, 2, 1, 2]
    assert predict(plan, known).makespan == 9


def spinning_steps(times: FloatArray) -> tuple[list[Timeline], list[Timeline]]:
    """What is measured where waits spin: the last backward of the first rank is quick."""
    plan = contiguous(2, BOUNDS, 6)
    known = replace(costs(times), backward=None)
    plans = one_by_one(plan.placement, 4), plan
    return tuple([predict(each, known, spinning=True)] for each in plans)  # pyright: ignore


def test_whether_waits_spin_is_measured() -> None:
    times = TIMES.copy()
    times[1] = times[2] + times[3]
    units = measured(*spinning_steps(times))
    assert units.spinning
    assert units.cores == math.inf
    np.testing.assert_allclose(units.times, times)
    for cores in (math.inf, 1.0, 1.5):
        assert not measured(*steps(cores)).spinning
    assert not measured(*spinning_steps(times), local=True).spinning


def test_turns_that_vary() -> None:
    """Where noise looks like turns, what actions have to do is nothing, and not less."""
    times = TIMES.copy()
    times[1] = times[2] + times[3]
    alone, together = spinning_steps(times)
    for seed in range(50):
        draw = np.random.default_rng(seed)
        noisy = [
            replace(each, end=each.end + draw.exponential(30.0, n) * (draw.random(n) < 0.3))
            for each in (*alone, *together)
            for n in [len(each.end)]
        ]
        assert np.nanmin(measured(noisy[:1], noisy[1:]).times) >= 0


def test_turns_on_a_gpu() -> None:
    """Turns of 2, and gaps of 6: what has 3 to do takes 9 or 15, and alone always 9."""
    none = np.zeros(0)
    together = [np.array([9.0, 9, 15, 15]), np.array([1.0, 7, 7, 1]), none, none]
    alone = [np.array([9.0, 9, 9]), np.array([7.0, 7]), np.array([14.0]), np.array([2.0])]
    single, times = _in_turns(alone, together, 4)
    np.testing.assert_allclose(times[:2, 0], [12.0, 4.0])
    np.testing.assert_allclose(single[:, 0], [12.0, 4.0, 8.0, 8.0])
    single, times = _in_turns(alone, [each[:1] for each in together], 4)  # no gap is seen
    np.testing.assert_allclose(single[:, 0], [9.0, 7.0, 14.0, 2.0])


def test_what_an_action_costs_is_found_again() -> None:
    """A stage of two units costs less than both, as one action begins instead of two."""
    begun = np.array([[0.1], [0.3], [0.0], [0.0]])
    merged = np.add.reduceat(TIMES, BOUNDS[:-1], axis=1) - begun
    whole = simulate(build("1f1b", ranks=2, microbatches=4), costs(merged))
    units = with_overhead(measured(*steps(math.inf)), [whole], BOUNDS)
    assert units.overhead == pytest.approx((0.1, 0.3, 0.15, 0.15))
    assert units.costs(BOUNDS, Placement.linear(2)).forward == pytest.approx(merged[0])


def test_a_send_is_a_cost_where_the_next_stage_is_elsewhere() -> None:
    units = Units(TIMES, send=0.5, flight=2.0, sizes=np.array([[0.0], [0.0], [1e6]]))
    found = units.costs(range(5), Placement.v(2))
    assert found.forward == (1.5, 2.0, 3.5, 1.0)
    assert found.backward_input == (1.2, 3.5, 3.0, 1.5)
    assert isinstance(found.link, Link)
    assert found.link.bandwidth == pytest.approx(1e6 / 1.5)
    small = Units(TIMES, send=0.5, flight=2.0).costs(range(5), Placement.v(2))
    assert isinstance(small.link, Link)
    assert (small.link.latency, small.message_bytes) == (1.5, 0.0)


@pytest.mark.parametrize("name", ["1f1b", "zb_h2", "zbv", "interleaved_1f1b", "dualpipev"])
def test_sharing_cores(name: str) -> None:
    plan = build(name, ranks=4, microbatches=8)
    free, single = predict(plan, Costs(), 4), predict(plan, Costs(), 1)
    assert free.makespan == predict(plan, Costs()).makespan
    total = free.busy.sum()
    assert single.makespan == pytest.approx(total)
    assert free.makespan < predict(plan, Costs(), 2).makespan < total
    assert work(single, 1).sum() == pytest.approx(total)
    almost = predict(plan, Costs(), 4 - 1e-9)
    np.testing.assert_allclose(almost.end, free.end, rtol=1e-6)


def test_halves_are_one_backward_where_nothing_lies_between() -> None:
    """Rank 1 sends what its I has found before its W runs; rank 0 sends nothing."""
    plan = Plan.from_actions([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])
    timeline = predict(plan, Costs(backward_input=2.0, backward_weight=2.0, backward=3.0))
    assert [str(a) for a in timeline.plan[0]] == ["0F0", "0B0"]
    assert [str(a) for a in timeline.plan[1]] == ["1F0", "1I0", "1W0"]
    assert timeline.makespan == 1 + 1 + 2 + 3


def test_a_traced_plan_is_lowered() -> None:
    plan = lower(build("1f1b", ranks=2, microbatches=4))
    assert work(simulate(plan, Costs())).sum() == 2 * 4 * 3


@pytest.mark.parametrize("placement", [Placement.linear(3), Placement.v(2), Placement.loop(2, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_cuts_are_the_best_ones(placement: Placement, seed: int) -> None:
    """At most 5% from the best of all cuts."""
    random = Random(seed)
    count = 9
    units = Units(np.array([[random.uniform(1, 4) for _ in range(count)]] * 4))
    time = units.times[:2].sum(0)

    def busiest(bounds: tuple[int, ...]) -> float:
        each = np.add.reduceat(time, bounds[:-1])
        return float(np.bincount(placement.rank_of, each).max())

    everything = [
        (0, *inner, count) for inner in combinations(range(1, count), placement.stages - 1)
    ]
    found = cut(units, placement, [math.inf] * placement.ranks)
    assert busiest(found) <= 1.05 * min(map(busiest, everything))


def test_an_uneven_model() -> None:
    """The best plan is ahead of 1F1B, is valid, and keeps within the memory."""
    times = np.array([[0.1, *[1.0] * 8, 4.0]])
    times = np.concatenate([times, 2.2 * times, 1.1 * times, 1.1 * times])
    units = Units(times, sizes=np.array([[5.0], [8.0], [0.0]]), unit="ms")
    free = candidates(units, 4, 8, seconds=4)
    plain = next(each for each in free if each.plan.name == "1f1b")
    assert free[0].time < plain.time
    assert all(each.least <= each.time * (1 + 1e-9) for each in free)
    limits = [100.0] * 4
    found = candidates(units, 4, 8, memory=limits, seconds=4)
    assert 0 < len(found) < len(free)
    for each in found:
        assert not validate(each.plan)
        known = units.costs(each.bounds, each.plan.placement)
        held = units.held(each.bounds)[1]
        held = np.bincount(each.plan.placement.rank_of, held)
        assert (held + peak_memory(each.plan, known)).max() == each.memory <= 100
    text = described(with_measured(found, [9.0, 8.0]), units, limits)
    assert text.startswith(f"chosen: {found[1].plan.name}, measured to be among the quickest of ")
    assert "within 100 B a rank" in text
    assert "no plan with these cuts takes less than" in text


def test_what_is_measured_decides_as_far_as_one_can_tell() -> None:
    units = Units(np.outer([1.0, 2.0, 1.0, 1.0], 1.0 + np.arange(8) % 3))
    found = candidates(units, 2, 4, seconds=1)
    named = [each for each in found if each.plan.name != "optimised"]
    searched = [each for each in found if each.plan.name == "optimised"]
    three = [searched[0], named[0], named[1]]
    names = [each.plan.name for each in three]
    for times, order in (
        ([100.0, 102.0, 101.0], [2, 1, 0]),  # alike, so the plain ones come first
        ([100.0, 104.0, 102.0], [2, 0, 1]),
        ([100.0, 104.0, 105.0], [0, 1, 2]),
    ):
        measured = with_measured(three, times)
        assert [each.plan.name for each in measured] == [names[at] for at in order]
        assert [each.measured for each in measured] == [times[at] for at in order]


def test_too_little_memory() -> None:
    """The error names what would be enough."""
    units = Units(np.ones((4, 8)), sizes=np.array([[512.0], [512.0], [0.0]]))
    with pytest.raises(ScheduleError) as raised:
        candidates(units, 4, 8, memory=[1000.0] * 4, seconds=1)
    assert str(raised.value) == (
        "no plan fits into memory=1000 B: the least is 2.0 KiB on rank 0, with 4 ranks × 1 stage, "
        "for its weights, their gradients, an optimizer like Adam and one micro-batch; pass at "
        "least this as memory, make micro-batches smaller, or start more ranks"
    )
    assert candidates(units, 4, 8, memory=[2048.0] * 4, seconds=1)
