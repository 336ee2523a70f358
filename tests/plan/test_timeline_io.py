"""Timelines as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taktline.errors import PlanFileError
from taktline.plan import (
    Plan,
    build,
    read,
    read_costs,
    read_timeline,
    simulate,
    write,
    write_timeline,
)
from taktline.plan.io import is_timeline
from taktline.plan.timeline import Timeline
from tests.plan.strategies import any_plan, costs


@given(st.data(), any_plan())
def test_a_file_keeps_everything(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, plan: Plan
) -> None:
    file = tmp_path_factory.mktemp("timelines") / "a.json"
    timeline = simulate(plan, data.draw(costs(plan.stages)))
    write_timeline(timeline, file)
    again = read_timeline(file)
    assert again.plan == timeline.plan
    assert again.name == timeline.name
    assert again.costs == timeline.costs == read_costs(file)
    assert again.arrival is not None
    assert timeline.arrival is not None
    assert (again.start == timeline.start).all()
    assert (again.end == timeline.end).all()
    assert (again.arrival == timeline.arrival).all()
    assert not again.measured
    assert is_timeline(file)
    assert read(file) == timeline.plan


def test_measured_is_kept_and_named(tmp_path: Path) -> None:
    simulated = simulate(build("1f1b", ranks=2, microbatches=2))
    measured = Timeline(simulated.plan, simulated.start, simulated.end, measured=True)
    write_timeline(measured, tmp_path / "a.json")
    again = read_timeline(tmp_path / "a.json")
    assert again.measured
    assert again.arrival is None
    assert again.name == "1f1b, measured"
    assert "1f1b, measured" in again.to_text(100)
    assert "1f1b, measured" in again.to_svg()
    assert "1f1b, measured" in again.to_html(simulated)
    assert "1f1b, measured" in again.to_trace()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": None}, "start is null, not a list"),
        ({"start": [[0.0], [1.0]]}, "start must have a number for each action of each rank"),
        ({"end": [["1"] * 4, [1.0] * 4]}, r"end\[0\]\[0\] is a text, not a number"),
        ({"end": [[True] * 4, [1.0] * 4]}, "is true or false, not a number"),
        ({"end": [[10**600] * 4, [1.0] * 4]}, "end holds a number that is too large"),
        ({"measured": 1}, "measured is a whole number, not true or false"),
        ({"ranks": [["0F0", "0F0", "0B0", "0B0"], ["1F0", "1B0"] * 2]}, "is not valid: 8 viol"),
        ({"arrival": [[float("nan")] * 4, [1.0] * 4]}, "holds a number that is not finite"),
        ({"end": [[0.0] * 4, [0.0] * 4]}, "an action ends before it starts"),
        ({"costs": {"speed": 1}}, "there is no cost 'speed'"),
        ({"format": "taktline-plan"}, "holds a plan and no times"),
        ({"format": "other"}, "not a plan"),
        ({"version": 2}, "has version 2 of the format"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "a.json"
    write_timeline(simulate(build("1f1b", ranks=2, microbatches=2)), file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(PlanFileError, match=message):
        read_timeline(file)


def test_only_json_holds_timelines(tmp_path: Path) -> None:
    timeline = simulate(build("1f1b", ranks=2, microbatches=2))
    with pytest.raises(PlanFileError, match=r"ends in \.json"):
        write_timeline(timeline, tmp_path / "a.csv")
    write(timeline.plan, tmp_path / "plan.csv")
    assert not is_timeline(tmp_path / "plan.csv")
    with pytest.raises(PlanFileError, match=r"ends in \.json"):
        read_timeline(tmp_path / "plan.csv")


def test_one_line_a_rank(tmp_path: Path) -> None:
    write_timeline(simulate(build("gpipe", ranks=2, microbatches=1)), tmp_path / "a.json")
    lines = (tmp_path / "a.json").read_text().splitlines()
    assert "    [0.0, 4.0]," in lines
    assert np.isclose(read_timeline(tmp_path / "a.json").makespan, 6.0)
