"""Slow ranks in timelines that are known to have them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from taktline.errors import ArgumentError, CostError, PlanError
from taktline.plan import Costs, Kind, Timeline, build, simulate, stragglers

WORK = (1.0, 2.0, 3.0, 2.0)
COUNTED = Costs(forward=WORK, backward_input=WORK, backward_weight=WORK)


def timeline(
    schedule: str = "1f1b", pace: tuple[float, ...] = (1, 1, 1, 1), **which: bool
) -> Timeline:
    """Four stages of unequal work, each at its own pace."""
    slow = tuple(w * p for w, p in zip(WORK, pace, strict=True))
    forward = slow if which.get("forward", True) else WORK
    backward = slow if which.get("backward", True) else WORK
    costs = Costs(forward=forward, backward_input=backward, backward_weight=backward, unit="ms")
    return simulate(build(schedule, ranks=4, microbatches=8), costs)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_one_rank_or_none_is_slow(schedule: str) -> None:
    assert stragglers([timeline(schedule)], work=COUNTED) == []
    for slow in range(4):
        pace = tuple(1.8 if rank == slow else 1.0 for rank in range(4))
        found = stragglers([timeline(schedule, pace)], work=COUNTED)
        assert {(each.rank, each.stage, each.kind) for each in found} == {
            (slow, slow, Kind.F),
            (slow, slow, Kind.B),
        }
        assert all(each.factor == pytest.approx(1.8) for each in found)


def test_only_the_forward() -> None:
    slow = timeline(pace=(1, 1, 2, 1), backward=False)
    (found,) = stragglers([slow], work=COUNTED)
    assert str(found) == (
        "rank 2 is slow: the forward of stage 2 takes 6 ms, 2.0 times what its work accounts for; "
        "slowest in micro-batches 0, 1, 2"
    )


def test_two_stages_on_a_rank() -> None:
    plan = build("zbv", ranks=2, microbatches=6)
    slow = simulate(plan, Costs(forward=(1, 3, 1, 1)))
    (found,) = stragglers([slow], work=Costs())
    assert (found.rank, found.stage, found.kind) == (1, 1, Kind.F)


def test_the_slowest_micro_batches_come_first() -> None:
    slow = timeline(pace=(1, 2, 1, 1), backward=False)
    rows, end = slow.plan.rows, slow.end.copy()
    for microbatch, more in ((5, 0.25), (2, 0.125)):
        here = (rows.stage == 1) & (rows.kind == Kind.F) & (rows.microbatch == microbatch)
        end[np.flatnonzero(here)] += more
    (found,) = stragglers([replace(slow, end=end)], work=COUNTED)
    assert found.microbatches == (5, 2, 0)


def test_less_than_a_hundredth_of_a_step_is_not_reported() -> None:
    work = Costs(forward=(1.0, 1.0, 1.0, 0.0001))
    slow = simulate(build("1f1b", ranks=4, microbatches=8), Costs(forward=(1.0, 1.0, 1.0, 0.0004)))
    assert stragglers([slow], work=work) == []


def test_stages_without_work_and_one_rank_alone() -> None:
    alone: Timeline = simulate(build("1f1b", ranks=1, microbatches=2))
    assert stragglers([alone], work=Costs()) == []
    assert stragglers([timeline()], work=replace(COUNTED, forward=0.0)) == []


def test_what_does_not_fit() -> None:
    assert stragglers([], work=COUNTED) == []
    other = simulate(build("1f1b", ranks=2, microbatches=2))
    with pytest.raises(PlanError, match="the same stages on the same ranks"):
        stragglers([timeline(), other], work=COUNTED)
    with pytest.raises(CostError, match="the work of the stages is not known: pass it as work="):
        stragglers([timeline()], work=None)
    with pytest.raises(ArgumentError, match="factor must be"):
        stragglers([timeline()], work=COUNTED, factor=0.5)
    with pytest.raises(ArgumentError, match=r"timelines\[0\] must be a Timeline"):
        stragglers([1], work=COUNTED)  # pyright: ignore
