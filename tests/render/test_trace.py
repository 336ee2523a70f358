"""Traces: valid trace events, with an arrow for every message."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taktline.plan import Costs, Plan, build, lower, simulate
from taktline.render.trace import to_trace
from tests.plan.strategies import costs, shapes


def events(text: str) -> list[dict[str, Any]]:
    """The events, which have what the Trace Event Format needs."""
    found = json.loads(text)["traceEvents"]
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in found:
        assert {"pid", "name"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= 0
        if event["ph"] == "X":
            lane = lanes.setdefault((event["pid"], event["tid"]), [])
            lane.append((event["ts"], event["ts"] + event["dur"]))
    for lane in lanes.values():
        for (_, end), (start, _) in pairwise(sorted(lane)):
            assert start >= end - 1e-6, "slices of a thread overlap without nesting"
    return found


@settings(max_examples=40)
@given(st.data(), shapes(4, 5), st.booleans())
def test_keeps_the_format(data: st.DataObject, plan: Plan, lowered: bool) -> None:
    plan = lower(plan) if lowered else plan
    found = events(simulate(plan, data.draw(costs(plan.stages))).to_trace())
    flows = [event for event in found if event["ph"] in "sf"]
    assert all(count == 1 for count in Counter((e["ph"], e["id"]) for e in flows).values())
    ends = {e["id"]: e for e in flows if e["ph"] == "f"}
    for begin in (e for e in flows if e["ph"] == "s"):
        end = ends.pop(begin["id"])
        assert begin["tid"] != end["tid"]
        assert begin["ts"] <= end["ts"] + 1e-6
        assert end["bp"] == "e"
    assert not ends


@pytest.mark.parametrize("lowered", [False, True])
def test_an_arrow_for_each_message_from_slice_to_slice(lowered: bool) -> None:
    plan = build("1f1b", ranks=3, microbatches=4)
    found = events(simulate(lower(plan) if lowered else plan).to_trace())
    slices = [event for event in found if event["ph"] == "X"]
    assert len(slices) == len(plan)

    def around(event: dict[str, Any]) -> str:
        return next(
            s["name"]
            for s in slices
            if s["tid"] == event["tid"] and s["ts"] <= event["ts"] < s["ts"] + s["dur"]
        )

    ends = {event["id"]: event for event in found if event["ph"] == "f"}
    arrows = {
        (event["name"], around(event), around(ends[event["id"]]))
        for event in found
        if event["ph"] == "s"
    }
    assert arrows == {
        arrow
        for number in range(4)
        for stage in range(2)
        for arrow in (
            ("activation", f"{stage}F{number}", f"{stage + 1}F{number}"),
            ("gradient", f"{stage + 1}B{number}", f"{stage}B{number}"),
        )
    }


def test_slices_tell_more() -> None:
    found = events(simulate(build("dualpipev", ranks=2, microbatches=4)).to_trace())
    by_name = {event["name"]: event for event in found if event["ph"] == "X"}
    pair = by_name["0F3&3B1"]
    assert pair["args"] == {"stage": 0, "micro-batch": 3, "held up by": "3F1"}
    assert by_name["1F0"]["args"]["held up by"] == "0F0"
    assert "held up by" not in by_name["0F0"]["args"]


@pytest.mark.parametrize(("unit", "scale"), [("ms", 1e3), ("s", 1e6), ("µs", 1), ("", 1e3)])
def test_units(unit: str, scale: float) -> None:
    found = events(simulate(build("gpipe", ranks=1, microbatches=1), Costs(unit=unit)).to_trace())
    assert [event["dur"] for event in found if event["ph"] == "X"] == [scale, 2 * scale]


def test_several_timelines_are_several_processes() -> None:
    timelines = [simulate(build(name, ranks=2, microbatches=2)) for name in ("gpipe", "1f1b")]
    found = events(to_trace(timelines))
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {0: "gpipe", 1: "1f1b"}
    ids = [event["id"] for event in found if event["ph"] == "s"]
    assert len(ids) == len(set(ids))
