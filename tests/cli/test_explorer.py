"""The explorer: its planner agrees with the package, and a browser shows what it finds."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from taktline.cli.app import app
from taktline.cli.explorer import page
from taktline.cli.options import Times
from taktline.plan import Kind, Timeline, build, find, names, read, simulate
from tests.browser import Opened, browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

SCHEDULES = [name for name in names() if name != "forward_only"]


def test_writes_the_page_that_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    words = ["explore", "zb_v", "--ranks", "8", "--comm", "0.1", "--output", str(file)]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.output) == (0, f"{file}: open it in a browser\n")
    assert file.read_text() == page(["zbv"], ranks=8, comm=0.1)


def test_nothing_comes_from_elsewhere() -> None:
    text = page()
    assert not re.findall(r"https?://|//[a-z]+\.[a-z]", text)
    assert not re.findall(r"<(?:script|img|iframe)[^>]* src|@import|url\(|fetch\(", text)
    assert "default-src 'none'" in text


# ---- In the browser -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


class Explorer(Opened):
    name = "explorer"

    def set(self, name: str, value: float) -> None:
        self.slider(name).fill(str(value))
        self.frame()

    def slider(self, name: str) -> Locator:
        return self.page.locator(f"input[type=range][name={name}]")

    def row(self, schedule: str) -> list[str]:
        found = self.page.locator("#rows tr").filter(has=self.page.get_by_label(schedule))
        return found.first.locator("td").all_inner_texts()

    def facts(self) -> list[str]:
        return self.page.locator(".facts").all_inner_texts()


@pytest.fixture
def opened(chromium: Browser, tmp_path: Path) -> Iterator[Callable[..., Explorer]]:
    pages: list[Explorer] = []

    def open_page(address: str = "", **options: Any) -> Explorer:
        pages.append(Explorer(chromium, tmp_path / "explorer.html", page(), address, **options))
        return pages[-1]

    yield open_page
    for each in pages:
        each.close()


@pytest.fixture(scope="module")
def planner(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explorer]:
    """One page for those who only ask for plans: to open it takes longer than dozens of them."""
    page_of_all = Explorer(chromium, tmp_path_factory.mktemp("page") / "explorer.html", page())
    yield page_of_all
    page_of_all.close()


# As text, which travels much quicker than lists.
PLANS = """cases => JSON.stringify(cases.map(([name, ranks, each, microbatches, costs]) => {
    const plan = build(name, ranks, each, microbatches), timeline = simulate(plan, costs);
    const column = (of) => plan.rows.flat().map(of);
    return {
        kind: column(({ kind }) => kind).join(""), stage: column(({ stage }) => stage),
        microbatch: column(({ microbatch }) => microbatch),
        joined: column(({ joined }) => Number(Boolean(joined))),
        offsets: plan.rows.map((row) => row.length), rank_of: plan.rankOf,
        start: timeline.start.flatMap((row) => [...row]),
        end: timeline.end.flatMap((row) => [...row]),
        makespan: timeline.makespan, bubble: timeline.bubble, peaks: timeline.peaks,
    };
}))"""


def few(ranks: int) -> list[int]:
    """Numbers of micro-batches between which plans change: about as many as ranks, or twice."""
    return sorted(
        {1, 2, ranks, *(times * ranks + more for times in (1, 2) for more in (-1, 1))} - {0}
    )


@pytest.mark.processes
@pytest.mark.parametrize("name", SCHEDULES)
def test_plans_as_the_package_does(name: str, planner: Explorer) -> None:
    """Small sizes, and some large ones, with drawn costs."""
    draw = random.Random(name)
    sizes = [(ranks, many) for ranks in range(1, 9) for many in few(ranks)]
    sizes += [(draw.randint(1, 8), draw.randint(1, 24)) for _ in range(16)]
    sizes += [(draw.randint(9, 32), draw.randint(1, 64)) for _ in range(8)]
    cases: list[tuple[str, int, int | None, int, dict[str, float]]] = []
    for ranks, many in sizes:
        each = draw.randint(1, 3) if find(name).stages_per_rank is None else None
        costs = {part: draw.choice([0.3, 1, 1.7]) for part in ("forward", "backward", "weight")}
        cases.append((name, ranks, each, many, {**costs, "comm": draw.choice([0, 0.2, 1.5])}))
    for case, there in zip(cases, json.loads(planner.page.evaluate(PLANS, cases)), strict=True):
        _, ranks, each, many, costs = case
        (timeline,) = Times(ranks, each, many, **costs).timelines([name], predict=False)
        assert_same(timeline, there)


def assert_same(timeline: Timeline, there: dict[str, Any]) -> None:
    plan, rows = timeline.plan, timeline.plan.rows
    assert "".join(Kind(kind).name for kind in rows.kind.tolist()) == there["kind"]
    for column in ("stage", "microbatch", "joined"):
        assert getattr(rows, column).tolist() == there[column]
    assert np.diff(plan.offsets).tolist() == there["offsets"]
    assert list(plan.placement.rank_of) == there["rank_of"]
    for column in ("start", "end"):
        np.testing.assert_allclose(there[column], getattr(timeline, column), atol=1e-9)
    figures = [there["makespan"], there["bubble"], *there["peaks"]]
    expected = [timeline.makespan, timeline.bubble(), *timeline.peak_memory]
    np.testing.assert_allclose(figures, expected, atol=1e-9)


@pytest.mark.processes
def test_knows_all_schedules(opened: Callable[..., Explorer]) -> None:
    shown = opened()
    assert shown.page.evaluate("Object.keys(SCHEDULES)") == SCHEDULES
    assert [
        text.split()[0] for text in shown.page.locator("#rows tr").all_inner_texts()
    ] == SCHEDULES
    assert shown.row("1f1b")[1:] == ["27.3%", "33", "4"]
    assert shown("chosen()") == ["1f1b", "zbv"]
    assert "Choose interleaved_zero_bubble or zbv" in shown.page.locator("#advice").inner_text()
    found = (
        "The best plan that was found for these settings: 5.9% bubble, makespan 25.5, "
        "4 micro-batches in memory."
    )
    assert found in shown.page.locator("#advice").inner_text()
    shown.set("comm", 0.5)
    assert "The best plan" not in shown.page.locator("#advice").inner_text()


@pytest.mark.processes
def test_a_slider_redraws_all_of_it(opened: Callable[..., Explorer]) -> None:
    shown = opened()
    before = shown("boxes()")
    shown.set("microbatches", 16)
    assert shown("boxes()") == [2 * count for count in before]
    plan = build("1f1b", ranks=4, microbatches=16)
    assert shown.row("1f1b")[1] == f"{simulate(plan).bubble():.1%}"
    assert "16 micro-batches" in shown.facts()[0]
    shown.set("memory", 3)
    assert "over the limit" in shown.facts()[0]
    assert shown.page.locator("#rows tr.over").count() == 9
    assert "Choose v_half: the quickest that fits" in shown.page.locator("#advice").inner_text()
    assert shown("frontier()") == ["v_min", "v_half", "interleaved_zero_bubble"]
    shown.set("memory", 1)
    assert "No schedule keeps within 1" in shown.page.locator("#advice").inner_text()


@pytest.mark.processes
def test_the_address_keeps_the_settings(opened: Callable[..., Explorer]) -> None:
    first = opened()
    first.set("ranks", 8)
    first.set("comm", 0.15)
    first.page.get_by_role("checkbox", name="v_min").first.check()
    first.frame()
    address = first.page.url.partition("#")[2]
    assert address == "show=1f1b,zbv,v_min&ranks=8&comm=0.15"
    again = opened(f"#{address}")
    assert again("settings()") == first("settings()")
    assert again.facts() == first.facts()
    assert "taktline show 1f1b zbv v_min -r 8 --comm 0.15" in again.page.inner_text("footer")
    again.page.evaluate("location.hash = 'ranks=6'")
    again.page.wait_for_function("explorer.settings().ranks === 6")
    assert again("chosen()") == ["1f1b", "zbv"]
    again.page.click("#reset")
    again.frame()
    assert again("chosen()") == ["1f1b", "zbv"]
    nonsense = opened("#ranks=many&microbatches=1e9&show=zbv,2f2b,zbv")
    assert nonsense("chosen()") == ["zbv"]
    assert {name: nonsense("settings()")[name] for name in ("ranks", "microbatches")} == {
        "ranks": 4,
        "microbatches": 128,
    }


@pytest.mark.processes
@pytest.mark.parametrize("name", ["interleaved_1f1b", "dualpipev"])
def test_downloads(name: str, opened: Callable[..., Explorer], tmp_path: Path) -> None:
    shown = opened(f"#show={name}&stages_per_rank=3&comm=0.25&forward=1.3")
    files = {}
    for kind in ("CSV", "SVG", "Python"):
        with shown.page.expect_download() as waiting:
            shown.page.get_by_role("button", name=f"Download {name} as {kind}").click()
        files[kind] = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(files[kind])
    each = 3 if name == "interleaved_1f1b" else None
    assert read(files["CSV"]) == build(name, ranks=4, microbatches=8, stages_per_rank=each)
    lines: dict[str, Any] = {}
    exec(files["Python"].read_text(), lines)
    assert f"{lines['timeline'].makespan:.5g}" == shown.row(name)[2]
    assert f"{lines['timeline'].peak_memory.max():.5g}" == shown.row(name)[3]
    assert files["SVG"].read_text().count("<title>") == 1 + len(lines["plan"].rows)


@pytest.mark.processes
def test_by_keys_alone(opened: Callable[..., Explorer]) -> None:
    shown = opened()
    shown.slider("ranks").focus()
    shown.page.keyboard.press("ArrowRight")
    shown.page.get_by_role("checkbox", name="gpipe").first.focus()
    shown.page.keyboard.press("Space")
    shown.frame()
    assert (shown("settings()")["ranks"], shown("chosen()")) == (5, ["1f1b", "zbv", "gpipe"])
    shown.page.locator("#plot a[data-name=v_min]").focus()
    shown.page.keyboard.press("Enter")
    shown.frame()
    shown.page.get_by_role("button", name="Move v_min up").focus()
    shown.page.keyboard.press("Enter")
    shown.page.keyboard.press("Enter")
    shown.frame()
    assert shown("chosen()") == ["1f1b", "v_min", "zbv", "gpipe"]
    shown.page.locator("canvas").first.focus()
    shown.page.keyboard.press("+")
    shown.frame()
    start, end = shown("view()")
    assert end - start == pytest.approx(1 / 1.5)
    shown.page.keyboard.press("ArrowRight")
    shown.frame()
    assert shown("view()")[0] > start
    shown.page.keyboard.press("0")
    shown.frame()
    assert shown("view()") == [0, 1]


@pytest.mark.processes
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(scheme: Any, opened: Callable[..., Explorer]) -> None:
    viewport = {"width": 360, "height": 700}
    shown = opened(viewport=viewport, color_scheme=scheme, has_touch=True, is_mobile=True)
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 360
    page_colour = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert page_colour == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 27)"}[scheme]
    shown.page.get_by_role("checkbox", name="v_half").first.tap()
    shown.frame()
    assert shown("chosen()") == ["1f1b", "zbv", "v_half"]
    everything = shown("boxes()")
    assert all(everything)
    shown.page.get_by_role("button", name="Zoom in").tap()
    shown.frame()
    assert sum(shown("boxes()")) < sum(everything)
    shown.page.get_by_role("button", name="Fit").tap()
    shown.frame()
    assert shown("boxes()") == everything
