"""SVG drawings: well-formed, to scale, complete."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from taktline.cli.app import app
from taktline.plan import Costs, Plan, build, simulate
from taktline.render.svg import LEFT
from tests.plan.strategies import costs, shapes

NS = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> dict[str, tuple[float, float, float, float]]:
    """(x, y, width, height) of each action's box, by the text that hovering shows."""
    found = {}
    for rect in ElementTree.fromstring(svg).iter(f"{NS}rect"):
        title = rect.find(f"{NS}title")
        if title is not None:
            values = tuple(float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
            found[(title.text or "").partition(":")[0]] = values
    return found


@settings(max_examples=40)
@given(st.data(), shapes(4, 6))
def test_every_action_has_its_box_to_scale(data: st.DataObject, plan: Plan) -> None:
    timeline = simulate(plan, data.draw(costs(plan.stages)))
    drawn = boxes(timeline.to_svg(width=1000))
    makespan = timeline.makespan or 1.0
    scale = (1000 - 2 * LEFT) / makespan
    expected = {
        str(span.action): span
        for rank in range(plan.ranks)
        for span in timeline.spans(rank)
        if span.action.kind.is_compute
    }
    assert drawn.keys() == expected.keys()
    for name, span in expected.items():
        x, _, width, _ = drawn[name]
        assert x == pytest.approx(LEFT + span.start * scale, abs=0.01)
        assert width == pytest.approx((span.end - span.start) * scale, abs=0.01)


def test_ranks_have_a_lane_each_and_pairs_share_it() -> None:
    plan = Plan.from_actions([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]])
    drawn = boxes(simulate(plan).to_svg())
    assert drawn["0F1"][0] == drawn["0B0"][0]
    assert drawn["0B0"][1] == drawn["0F1"][1] + drawn["0F1"][3]
    assert drawn["0F0"][3] == 2 * drawn["0F1"][3]


def test_a_number_fits_into_every_box() -> None:
    plan = build("interleaved_1f1b", ranks=8, stages_per_rank=2, microbatches=32)
    texts = re.findall(r"fill='(?:white|#222)'>(\d+)</text>", simulate(plan).to_svg())
    assert len(texts) == len(plan)


def test_says_what_it_shows() -> None:
    svg = simulate(build("zbv", ranks=2, microbatches=3), Costs(unit="ms")).to_svg()
    text = " ".join(ElementTree.fromstring(svg).itertext())
    for word in ("zbv", "2 ranks, 3 micro-batches", "makespan 19 ms", "bubble", "rank 1", "peak 2",
                 "forward (F)", "backward for the inputs (I)", "backward for the weights (W)",
                 "idle", "memory"):  # fmt: skip
        assert word in text
    assert "backward (B)" not in text


def test_a_name_cannot_break_it() -> None:
    plan = Plan.from_actions([["0F0"]], name="<b>&'\"</svg>")
    root = ElementTree.fromstring(simulate(plan).to_svg())
    assert (root.findtext(f"{NS}title") or "") == "<b>&'\"</svg>"


def test_the_legend_stays_inside_a_narrow_drawing() -> None:
    svg = simulate(build("dualpipev", ranks=2, microbatches=4)).to_svg(width=400)
    for rect in ElementTree.fromstring(svg).iter(f"{NS}rect"):
        assert float(rect.attrib.get("x", 0)) <= 400


def test_the_picture_in_the_readme_is_fresh(tmp_path: Path) -> None:
    command = "show 1f1b zbv --ranks 4 --microbatches 8 --output"
    kept = Path(__file__).parents[2] / "docs" / "images" / "1f1b-zbv.svg"
    drawn = tmp_path / "drawn.svg"
    assert CliRunner().invoke(app, [*command.split(), str(drawn)]).exit_code == 0
    assert kept.read_text() == drawn.read_text(), f"refresh with: taktline {command} {kept.name}"
