"""Simulation: published figures, closed forms, and a brute-force second opinion."""

from __future__ import annotations

import csv
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taktline.errors import CostError
from taktline.plan import (
    Costs,
    Kind,
    Level,
    Link,
    Links,
    Placement,
    Plan,
    Timeline,
    build,
    lower,
    memory_curve,
    optimise,
    peak_memory,
    read_costs,
    simulate,
    write,
)
from tests.plan.brute_force import finish_times
from tests.plan.strategies import any_plan, costs, shapes

FACTS = Path(__file__).parent / "facts"


def facts(name: str) -> list[dict[str, str]]:
    with open(FACTS / name, newline="") as file:
        return list(csv.DictReader(file))


TABLES = [
    (row, [float(row[name]) for name in ("t_f_ms", "t_b_ms", "t_w_ms")], float(row["t_comm_ms"]))
    for row in facts("zero_bubble_table_5.csv")
] + [
    (row, [2 * float(row[f"chunk_{k}_us"]) for k in "fbw"], float(row["comm_us"]))
    for row in facts("zero_bubble_table_8.csv")
]


class TestPublishedFigures:
    @pytest.mark.parametrize(("row", "times", "comm"), TABLES)
    def test_zero_bubble(self, row: dict[str, str], times: list[float], comm: float) -> None:
        """Zero Bubble Pipeline Parallelism (arXiv 2401.10241), tables 5 and 8."""
        for name, chunks, by, rate in (
            ("1f1b", 1, "makespan", "rate_1f1b"),
            (
                "interleaved_1f1b",
                int(row.get("chunks_per_rank_interleaved", 2)),
                "makespan",
                "rate_1f1b_interleaved_all_dependencies",
            ),
            ("zb_h1", 1, "makespan", "rate_zb_h1"),
            ("zb_h2", 1, "span", "rate_zb_h2"),
        ):
            ranks, microbatches = int(row["ranks"]), int(row["microbatches"])
            plan = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=chunks)
            forward, inputs, weights = (time / chunks for time in times)
            link = Link(latency=comm)
            costs = Costs(
                forward=forward, backward_input=inputs, backward_weight=weights, link=link
            )
            for each in (plan, lower(plan)):
                bubble = simulate(each, costs).bubble("span" if by == "span" else "makespan")
                assert f"{bubble:.4f}".removeprefix("0") == row[rate], name

    @pytest.mark.parametrize(("name", "live"), [("v_min", 4), ("v_half", 6), ("zbv", 8)])
    def test_v_schedules_at_unit_cost(self, name: str, live: int) -> None:
        """Controllable Memory (arXiv 2405.15362): the best bubble found for so much memory."""
        rows = [
            row
            for row in facts("v_schedules_unit_cost.csv")
            if int(row["peak_chunk_activations"]) == live
        ]
        assert len(rows) == 2
        for row in rows:
            ranks, microbatches = int(row["ranks"]), int(row["microbatches"])
            timeline = simulate(build(name, ranks=ranks, microbatches=microbatches))
            assert max(timeline.peak_memory) == live / 2  # two chunks are a rank's share
            assert timeline.idle("span") <= int(row["bubble_units"])


@given(shapes(), st.data())
def test_equals_brute_force(plan: Plan, data: st.DataObject) -> None:
    quarters = st.integers(1, 12).map(lambda n: n / 4)
    times = {
        kind: data.draw(st.lists(quarters, min_size=plan.stages, max_size=plan.stages))
        for kind in "FBIW"
    }
    latency = data.draw(quarters)
    timeline = simulate(
        plan,
        Costs(
            forward=tuple(times["F"]),
            backward=tuple(times["B"]),
            backward_input=tuple(times["I"]),
            backward_weight=tuple(times["W"]),
            link=Link(latency=latency),
        ),
    )
    expected = finish_times(
        [[str(action) for action in plan[rank]] for rank in range(plan.ranks)],
        plan.placement.rank_of,
        times,
        latency,
    )
    for rank in range(plan.ranks):
        for span in timeline.spans(rank):
            action = span.action
            assert span.end == expected[action.stage, action.kind.name, action.microbatch]


@given(any_plan(), st.data())
def test_many_ranks_walk_together_as_one_by_one(plan: Plan, data: st.DataObject) -> None:
    """With so many ranks, all of them pass a stop at once: to the last bit, the same times."""
    chosen = data.draw(costs(plan.stages))
    saving = plan.level == Level.COMPUTE and not plan.rows.joined.any() and data.draw(st.booleans())
    if saving and plan.has(Kind.B, Kind.I):
        plan = _with_copies(plan)
    runs: list[Timeline] = []
    for many in (1, 10**9):
        with patch.object(sys.modules["taktline.plan.walk"], "_MANY", many):
            runs.append(simulate(plan, chosen))
    for name in ("start", "end", "arrivals"):
        assert np.array_equal(getattr(runs[0], name), getattr(runs[1], name)), name


def _with_copies(plan: Plan) -> Plan:
    """Every micro-batch of the first stage is offloaded, and reloaded before its backward."""
    ranks: list[list[str]] = []
    for rank in range(plan.ranks):
        ranks.append([])
        for action in map(str, plan[rank]):
            number = re.fullmatch(r"0([FBI])(\d+)", action)
            copy = {"F": "OFFLOAD", "B": "RELOAD", "I": "RELOAD"}[number[1]] if number else ""
            new = [f"0{copy}{number[2]}"] if number else []
            ranks[-1] += [action, *new] if copy == "OFFLOAD" else [*new, action]
    return Plan.from_actions(ranks, plan.placement, plan.microbatches)


@given(shapes())
def test_lowering_does_not_change_the_times(plan: Plan) -> None:
    costs = Costs(forward=1.5, backward_input=1.25, backward_weight=0.5, link=Link(latency=0.25))
    assert simulate(lower(plan), costs).makespan == simulate(plan, costs).makespan


class TestLinks:
    """Eight ranks, four on a host."""

    PLAN = build("forward_only", ranks=8, microbatches=1, stages_per_rank=1)

    def arrivals(self, links: Links, plan: Plan = PLAN) -> list[float]:
        """How long each rank's input took to arrive after the action before it."""
        timeline = simulate(plan, Costs(link=links, message_bytes=2.0))
        ends = [list(timeline.spans(rank))[-1].end for rank in range(plan.ranks)]
        return [later - before - 1 for before, later in pairwise(ends)]

    def test_within_a_host_and_across(self) -> None:
        links = Links(ranks_per_host=4, within=Link(latency=0.5), across=Link(bandwidth=1.0))
        assert self.arrivals(links) == [0.5, 0.5, 0.5, 2, 0.5, 0.5, 0.5]

    def test_a_slow_link_counts_both_ways(self) -> None:
        slow = {(6, 5): Link(latency=4.0), (0, 1): Link(latency=3.0)}
        links = Links(ranks_per_host=4, pairs=slow)
        assert self.arrivals(links) == [3, 0, 0, 0, 0, 4, 0]
        assert links.between(5, 6) == links.between(6, 5) == Link(latency=4.0)

    def test_ranks_of_one_place_are_on_a_rail(self) -> None:
        """With two ranks a host, a stage on each second rank first, every hop stays on a rail."""
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        cells = [[f"{order.index(rank)}F0"] for rank in range(8)]
        plan = Plan.from_actions(cells, Placement.custom(order))
        links = Links(ranks_per_host=2, rail=Link(latency=1.0), across=Link(latency=5.0))
        timeline = simulate(plan, Costs(link=links))
        ends = sorted(float(end) for end in timeline.end)
        assert [later - before - 1 for before, later in pairwise(ends)] == [1, 1, 1, 5, 1, 1, 1]

    @pytest.mark.parametrize("microbatches", [1, 3])
    def test_the_bound_and_the_best_plan_know_them(self, microbatches: int) -> None:
        """A slow link in the middle: what optimise expects is what the simulation finds."""
        costs = Costs(link=Links(ranks_per_host=2, across=Link(latency=3.0)))
        timeline = simulate(
            optimise(costs, ranks=4, microbatches=microbatches, memory=4, rounds=50), costs
        )
        assert timeline.bound is not None
        assert timeline.bound.makespan <= timeline.makespan
        assert timeline.makespan >= 4 * 2 + 2 * 3  # there and back over the slow link

    def test_they_are_written_to_files(self, tmp_path: Path) -> None:
        links = Links(ranks_per_host=2, rail=Link(latency=1.0), pairs={(3, 1): Link(bandwidth=2.0)})
        costs = Costs(link=links, unit="ms")
        write(self.PLAN, tmp_path / "plan.json", costs=costs)
        assert read_costs(tmp_path / "plan.json") == costs

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"ranks_per_host": 0}, "ranks_per_host must be a whole number from 1 up, not 0"),
            ({"rail": 2.0}, "rail must be a Link, not 2.0"),
            ({"pairs": 3}, "pairs must be a dict from pairs of ranks to links, not 3"),
            ({"pairs": {(1, 1): Link()}}, "must be two different numbers from 0 up, not (1, 1)"),
            ({"pairs": {(0, 1): 2}}, "the link between ranks (0, 1) must be a Link, not 2"),
            ({"pairs": {(0, 1): Link(), (1, 0): Link()}}, "between ranks 0 and 1 is given twice"),
        ],
    )
    def test_what_is_wrong_is_said(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(CostError, match=re.escape(message)):
            Links(**{"ranks_per_host": 2, **given})

    @pytest.mark.parametrize(
        ("link", "message"),
        [
            (1.0, "link must be a dict, not 1.0"),
            ({"ranks_per_host": 2, "across": 3}, "across must be a dict, not 3"),
            ({"ranks_per_host": 2, "pairs": [[]]}, "between ranks () must be a dict, not None"),
            ({"ranks_per_host": 2, "towers": 1}, "unexpected keyword argument 'towers'"),
        ],
    )
    def test_what_is_wrong_in_a_file_is_said(self, link: object, message: str) -> None:
        with pytest.raises(CostError, match=re.escape(message)):
            Costs.from_dict({"link": link})


class TestLink:
    CHAIN = Plan.from_actions([["0F0", "0F1", "0F2"], ["1F0", "1F1", "1F2"]])

    def test_latency_overlaps_compute(self) -> None:
        timeline = simulate(self.CHAIN, Costs(link=Link(latency=0.5)))
        assert [span.start for span in timeline.spans(1)] == [1.5, 2.5, 3.5]

    def test_messages_queue_for_their_channel(self) -> None:
        costs = Costs(link=Link(latency=0.5, bandwidth=10), message_bytes=30)
        timeline = simulate(self.CHAIN, costs)
        starts = [s.start for s in timeline.spans(1) if s.action.kind.is_compute]
        assert starts == [1 + 3 + 0.5, 1 + 6 + 0.5, 1 + 9 + 0.5]

    def test_a_gradient_is_as_large_as_its_activation(self) -> None:
        plan = Plan.from_actions([["0F0", "0B0"], ["1F0", "1B0"]])
        costs = Costs(link=Link(bandwidth=10), message_bytes=(30, 0))
        timeline = simulate(plan, costs)
        assert timeline.makespan == 1 + 3 + 1 + 2 + 3 + 2

    def test_communication_that_blocks(self) -> None:
        costs = Costs(link=Link(latency=0.5), comm_blocks=True)
        for plan in (self.CHAIN, lower(self.CHAIN)):
            timeline = simulate(plan, costs)
            starts = [s.start for s in timeline.spans(0) if s.action.kind.is_compute]
            assert starts == [0, 1.5, 3]
            assert timeline.busy.tolist() == [3, 3]

    def test_a_pair_sends_both_its_results(self) -> None:
        plan = build("dualpipev", ranks=2, microbatches=4)
        costs = Costs(link=Link(latency=0.25), comm_blocks=True)
        assert simulate(plan, costs).makespan == simulate(lower(plan), costs).makespan

    def test_within_a_rank_nothing_travels(self) -> None:
        plan = Plan.from_actions([["0F0", "1F0"]])
        assert simulate(plan, Costs(link=Link(latency=9.0))).makespan == 2


class TestTimeline:
    TIMELINE = simulate(build("1f1b", ranks=2, microbatches=2))

    def test_figures(self) -> None:
        timeline = self.TIMELINE
        assert timeline.makespan == 9
        assert timeline.rank_spans.tolist() == [9, 6]
        assert timeline.busy.tolist() == [6, 6]
        assert timeline.utilisation.tolist() == pytest.approx([6 / 9, 6 / 9])
        assert timeline.bubble() == pytest.approx(1 / 3)
        assert timeline.bubble("span") == pytest.approx(1 / 3)

    def test_critical_path_names_what_was_waited_for(self) -> None:
        costs = Costs(backward=(1.0, 2.0))
        path = simulate(build("gpipe", ranks=2, microbatches=2), costs).critical_path()
        assert [str(span.action) for span in path] == [
            "0F0", "1F0", "1F1", "1B0", "1B1", "0B1",
        ]  # fmt: skip
        assert str(path[-1]) == "rank 0: 0B1 7 – 8"

    @given(st.data(), shapes(4, 6))
    def test_critical_path_goes_forward_in_time(self, data: st.DataObject, plan: Plan) -> None:
        """It once left out the time in which a rank is busy sending, and jumped past waits."""
        timeline = simulate(plan, data.draw(costs(plan.stages)))
        path = timeline.critical_path()
        for before, after in pairwise(path):
            if before.rank == after.rank and before.start != after.start:
                assert before.end <= after.start
        assert max(span.end for span in path) == timeline.makespan

    def test_a_pair_counts_once(self) -> None:
        plan = Plan.from_actions([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]], Placement.linear(1))
        timeline = simulate(plan, Costs(overlap=2.5))
        assert timeline.busy.tolist() == [1 + 2.5 + 2]
        assert [span.start for span in timeline.spans(0)] == [0, 1, 1, 3.5]

    def test_critical_path_goes_through_slow_links(self) -> None:
        plan = lower(build("1f1b", ranks=2, microbatches=1))
        path = simulate(plan, Costs(link=Link(latency=5.0))).critical_path()
        assert [str(span.action) for span in path] == [
            "0F0", "0SEND_F0", "1F0", "1B0", "1SEND_B0", "0B0",
        ]  # fmt: skip


class TestMemory:
    def test_what_is_alive_while_and_after(self) -> None:
        plan = Plan.from_actions([["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]])
        costs = Costs(activation=4.0, kept_for_weight=1.0)
        during, after = memory_curve(plan, costs)
        assert during.tolist() == [4, 8, 8, 5, 4, 1]
        assert after.tolist() == [4, 8, 5, 4, 1, 0]

    def test_one_unit_whatever_the_stages_on_a_rank(self) -> None:
        peaks = {
            name: peak_memory(build(name, ranks=4, microbatches=8)) for name in ("1f1b", "zbv")
        }
        assert max(peaks["1f1b"]) == max(peaks["zbv"]) == 4
        looped = build("looped_bfs", ranks=2, microbatches=4, stages_per_rank=3)
        halves = peak_memory(looped, Costs(forward=(1.0,) * 6, kept_for_weight=0.5))
        assert halves.tolist() == pytest.approx([4, 4])
        assert peak_memory(looped, Costs(activation=8.0)).tolist() == [96, 96]
        assert (Costs().memory_unit, Costs(activation=8.0).memory_unit) == (
            "micro-batches",
            "bytes",
        )

    def test_stages_differ(self) -> None:
        plan = Plan.from_actions([["0F0", "1F0", "1B0", "0B0"]])
        assert peak_memory(plan, Costs(activation=(2.0, 3.0))).tolist() == [5]

    def test_the_paper_s_limits(self) -> None:
        """Memory of ZB-H1 and ZB-H2 with M_B and M_W of a real model (table 5, 1.5B)."""
        row = facts("zero_bubble_table_5.csv")[0]
        h, a, p, m = (int(row[name]) for name in ("hidden", "heads", "ranks", "microbatches"))
        whole, kept = 34 * h + 5 * a * 1024, 32 * h
        costs = Costs(activation=whole, kept_for_weight=kept)
        h1 = peak_memory(build("zb_h1", ranks=p, microbatches=m), costs)
        assert h1.tolist() == [(p - i + 1) * whole + (i - 1) * kept for i in range(1, p + 1)]
        h2 = peak_memory(build("zb_h2", ranks=p, microbatches=m), costs)
        assert h2.tolist() == [
            (2 * p - 2 * i + 1) * whole + (2 * i - 2) * kept for i in range(1, p + 1)
        ]


class TestCosts:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"forward": -1}, "forward must be a number from 0 up"),
            ({"backward_weight": [1, [2]]}, "backward_weight must be a number"),
            ({"activation": 1.0, "kept_for_weight": 2.0}, "cannot be larger"),
            ({"kept_for_weight": 2.0}, "cannot be larger"),
            ({"speed": 1}, "unexpected keyword argument 'speed'"),
            ({"link": {"latency": -1}}, "latency must be a number from 0 up"),
            ({"link": {"bandwidth": 0}}, "bandwidth must be more than 0"),
            ({"link": {"colour": 0}}, "unexpected keyword argument 'colour'"),
            ({"comm_blocks": "no"}, "comm_blocks must be True or False, not 'no'"),
            ({"unit": 3}, "unit must be a text, not 3"),
        ],
    )
    def test_that_make_no_sense(self, values: dict[str, object], message: str) -> None:
        with pytest.raises(CostError, match=message):
            Costs.from_dict(values)

    def test_for_another_number_of_stages(self) -> None:
        with pytest.raises(CostError, match="forward is for 3 stages, but the plan has 2"):
            simulate(build("1f1b", ranks=2, microbatches=2), Costs(forward=(1.0, 2.0, 3.0)))

    @given(costs(3))
    def test_survive_as_plain_values(self, costs: Costs) -> None:
        assert Costs.from_dict(costs.to_dict()) == costs
