"""Memory as part of a plan: copies to the host and back, recomputation, and plans that fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import taktline as tl
from taktline.errors import CostError, PlanError, ScheduleError
from taktline.plan import (
    Costs,
    Kind,
    Placement,
    Plan,
    build,
    fit_memory,
    memory_curve,
    peak_memory,
    read,
    restrict,
    simulate,
    write,
)
from taktline.plan.schedules import in_rounds, in_slots, rounds
from taktline.render import to_html, to_svg, to_trace
from tests.plan.strategies import shapes


def rank(actions: str) -> Plan:
    """A plan of one rank."""
    return Plan.from_actions([actions.split()])


PLAN = rank("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD0 0B0 0RELOAD1 0B1 0B2")


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        # Hidden to the host. Each RELOAD is started when its backward could run.
        (Costs(offload=0.5, reload=0.0), "O0 1 O1 2 F2 2 R0 3 B0 3 R1 5 B1 5 B2 7"),
        # The rank's next copy waits for an OFFLOAD, and what comes then does, too.
        (Costs(offload=2.5, reload=1.0), "O0 1 O1 3.5 F2 3.5 R0 6 B0 7 R1 9 B1 10 B2 12"),
        (Costs(offload=1.0, reload=3.0), "O0 1 O1 2 F2 2 R0 3 B0 6 R1 8 B1 11 B2 13"),
    ],
)
def test_copies_run_beside_the_computation(costs: Costs, expected: str) -> None:
    timeline = simulate(PLAN, costs)
    starts = {str(span.action)[1:]: span.start for span in timeline.spans(0)}
    short = {re.sub("FFLOAD|ELOAD", "", name): f"{start:g}" for name, start in starts.items()}
    names = expected.split()[::2]
    assert " ".join(f"{name} {short[name]}" for name in names) == expected
    copied = Costs.from_timeline(timeline)
    assert (copied.offload, copied.reload) == ((costs.offload,), (costs.reload,))


def test_reloads_of_a_rank_go_one_after_the_other() -> None:
    plan = rank("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0RELOAD1 0B0 0B1")
    timeline = simulate(plan, Costs(offload=0.5, reload=4.0))
    starts = [span.start for span in timeline.spans(0)]
    assert starts == [0.0, 1.0, 1.0, 2.0, 2.5, 6.5, 6.5, 10.5]
    path = " ".join(str(span.action) for span in timeline.critical_path())
    assert path == "0F0 0F1 0OFFLOAD1 0RELOAD0 0RELOAD1 0B1"


def test_memory_follows_from_the_order() -> None:
    during, after = memory_curve(PLAN, Costs(activation=4.0, offloadable=3.0))
    assert during.tolist() == [4, 4, 8, 5, 9, 9, 9, 8, 8, 4]
    assert after.tolist() == [4, 4, 8, 5, 9, 9, 5, 8, 4, 0]
    assert peak_memory(PLAN, Costs(activation=4.0, offloadable=3.0), host=True).tolist() == [6]
    again = rank("0F0 0F1 0RECOMPUTE0 0I0 0W0 0B1")
    during, _ = memory_curve(again, Costs(kept_for_recompute=0.25, kept_for_weight=0.5))
    assert during.tolist() == [0.25, 1.25, 2, 2, 1.5, 1]


def test_other_passes_and_files_keep_them(tmp_path: Path) -> None:
    plan = fit_memory(build("1f1b", ranks=4, microbatches=6), Costs(offload=1.0), 2)
    for ending in ("csv", "json"):
        write(plan, tmp_path / f"plan.{ending}")
        assert read(tmp_path / f"plan.{ending}") == plan
    lowered = tl.lower(plan, keep_ready=1, reduce=True)
    assert not tl.validate(lowered)
    assert not tl.validate(restrict(plan, 3))
    assert peak_memory(lowered).tolist() == peak_memory(plan).tolist()
    costs = Costs(offload=2.0, reload=(1.0,) * 4, recompute=3.0, kept_for_recompute=0.5)
    assert Costs.from_dict(costs.to_dict()) == costs


def test_drawings_have_a_lane_for_copies() -> None:
    timeline = simulate(PLAN, Costs(offload=1.0))
    rows = timeline.to_text(100).splitlines()[1:4]
    assert [row[:6].strip() for row in rows] == ["rank 0", "out", "back"]
    assert [re.findall(r"\dF\d", row) for row in rows[1:]] == [["0F0", "0F1"]] * 2
    assert "0OFFLOAD1: 2 – 3" in to_svg([timeline])
    assert "copy back" in to_html([timeline])
    assert to_trace([timeline]).count('"cat": "RELOAD"') == 2
    again = simulate(rank("0F0 0F1 0RECOMPUTE0 0B0 0B1"))
    assert "0R0" in again.to_text(60)
    assert "rank 0 │ 0F0       0OFFLOAD0 0F1 " in str(PLAN)
    # Work that is done again is lost, and no bound of other plans is said to hold.
    assert again.verdict == "bubble 14.3%; no plan is below 0.0%"


@given(shapes(most_microbatches=7), st.data())
def test_a_plan_fits_or_the_least_that_does_is_said(plan: Plan, data: st.DataObject) -> None:
    assume("B" in "".join(str(action) for action in plan[0]) or plan.has(Kind.I))
    share = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    times = st.sampled_from([0.0, 0.5, 1.5, 4.0])
    costs = Costs(
        activation=1.0,
        kept_for_weight=data.draw(share),
        kept_for_recompute=data.draw(share),
        offloadable=data.draw(share),
        offload=data.draw(times | st.none()),
        recompute=data.draw(times | st.none()),
    )
    assume((costs.offload, costs.recompute) != (None, None))
    before = peak_memory(plan, costs)
    limits = before * data.draw(st.lists(st.floats(0, 1), min_size=plan.ranks, max_size=plan.ranks))
    host = data.draw(st.sampled_from([None, 0.5, 2.0]))
    try:
        fitted = fit_memory(plan, costs, limits.tolist(), host=host)
    except ScheduleError as error:
        for at, least in re.findall(r"rank (\d+) needs at least ([\d.e+-]+),", str(error)):
            assert float(least) > limits[int(at)]
            limits[int(at)] = float(least)
        fitted = fit_memory(plan, costs, limits.tolist(), host=host)
    assert not tl.validate(fitted)
    assert (peak_memory(fitted, costs) <= limits * (1 + 1e-5)).all()
    assert host is None or (peak_memory(fitted, costs, host=True) <= host).all()
    kinds = fitted.rows.kind
    used = {kind for kind in (Kind.OFFLOAD, Kind.RECOMPUTE) if (kinds == kind).any()}
    assert used <= {
        *([Kind.OFFLOAD] if costs.offload is not None else []),
        *([Kind.RECOMPUTE] if costs.recompute is not None else []),
    }
    plain = kinds[~np.isin(kinds, [Kind.OFFLOAD, Kind.RELOAD, Kind.RECOMPUTE])]
    assert plain.tolist() == plan.rows.kind.tolist()


def interleaved(ranks: int, chunks: int, group: int) -> Plan:
    """Interleaving by groups of micro-batches."""
    placement = Placement.loop(ranks, chunks)
    rows = [
        in_slots(
            (in_rounds(Kind.F, placement.stages_of(r), rounds(12, group)), 0),
            (
                in_rounds(Kind.B, placement.stages_of(r)[::-1], rounds(12, group)),
                group * (chunks - 1) + ranks - 1 - r,
            ),
        )
        for r in range(ranks)
    ]
    return Plan(rows, placement, 12)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "group"), [(2, 2), (4, 4), (4, 3), (4, 2), (6, 4)])
def test_interleaving_by_groups_is_as_pipeoffload_says(ranks: int, group: int, chunks: int) -> None:
    """Smaller groups need less memory, and wait longer; groups of half the ranks where F is B."""
    plan, usual = interleaved(ranks, chunks, group), interleaved(ranks, chunks, ranks)
    assert not tl.validate(plan)
    assert peak_memory(plan, Costs(activation=1.0)).max() == group * (chunks - 1) + ranks
    for backward in (1.0, 2.0) if 2 * group > ranks else (1.0,):
        costs = Costs(backward=backward)
        idle, least = (simulate(each, costs).idle("span") for each in (plan, usual))
        assert idle - least == (ranks - group) * (chunks - 1) * (1 + backward)


@pytest.mark.parametrize(("length", "ratio"), [(4, 1.70), (8, 1.49), (16, 1.19), (32, 0.85)])
def test_copies_are_free_where_pipeoffload_says(length: int, ratio: float) -> None:
    """The time of a round trip by that of computing, for h = 4,096 at 220 TFLOP/s and 15 GB/s."""
    k = 10 / (3 * (6 * 4096 + length * 1024)) * 220e12 / 15e9
    assert k == pytest.approx(ratio, abs=0.01)
    plan, costs = build("interleaved_1f1b", ranks=4, microbatches=16), Costs(offload=1.5 * k)
    half = fit_memory(plan, costs, peak_memory(plan).max() / 2)
    lost = simulate(half, costs).cost("span") / simulate(plan, costs).cost("span") - 1
    assert (lost < 0.02) == (k <= 1)


def test_the_planner_recomputes_what_copies_cannot_save_in_time() -> None:
    plan = build("1f1b", ranks=4, microbatches=8)
    both = Costs(offload=3.0, recompute=1.0)
    times = {}
    for costs in (both, replace(both, offload=None), replace(both, recompute=None)):
        fitted = fit_memory(plan, costs, 2)
        times[costs] = simulate(fitted, both).cost("span")
    one, *others = times.values()
    assert one <= min(others)
    assert one < max(others)


def test_optimise_goes_below_what_one_micro_batch_needs() -> None:
    sizes = {"ranks": 2, "microbatches": 4, "placement": "v"}
    with pytest.raises(ScheduleError, match=r"no plan fits into memory 1\.5 on rank 0"):
        tl.optimise(Costs(activation=1.0), memory=1.5, **sizes)
    costs = Costs(activation=1.0, recompute=1.0, kept_for_weight=0.0)
    plan = tl.optimise(costs, memory=1.5, **sizes)
    assert peak_memory(plan, costs).max() <= 1.5
    with pytest.raises(ScheduleError, match=r"rank 0 needs at least 1, not 0\.5"):
        tl.optimise(costs, memory=0.5, **sizes)


def test_what_cannot_be_fitted() -> None:
    plan, copies = build("gpipe", ranks=2, microbatches=4), Costs(offload=1.0)
    with pytest.raises(CostError, match="the costs do not say what saves it: pass offload"):
        fit_memory(plan, Costs(), 1)
    with pytest.raises(PlanError, match="needs a COMPUTE plan without OFFLOAD"):
        fit_memory(fit_memory(plan, copies, 3), copies, 2)
    with pytest.raises(ScheduleError, match="rank 0 needs at least 2, not 1; rank 1 needs at"):
        fit_memory(plan, copies, 1)
    with pytest.raises(ScheduleError, match="rank 0 needs at least 4, not 2"):
        fit_memory(plan, copies, 2, host=0.5)
    with pytest.raises(ScheduleError, match="host is for 3 ranks, but there are 2"):
        fit_memory(plan, copies, 2, host=[1, 2, 3])
    with pytest.raises(CostError, match="offloadable is a part of activation"):
        Costs(offloadable=2.0)
    assert fit_memory(plan, Costs(), 4) == plan
