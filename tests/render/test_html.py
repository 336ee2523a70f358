"""The page of timelines: what is in it, and what a browser makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from taktline.errors import CostError, PlanError
from taktline.plan import (
    Costs,
    Kind,
    Link,
    Plan,
    Timeline,
    build,
    lower,
    memory_curve,
    simulate,
)
from taktline.render.html import to_html
from taktline.render.svg import shade
from tests.browser import Opened, browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

HALF = Costs(forward=0.5, backward_input=0.5, backward_weight=0.5)
NASTY = "</script><script>document.title='broken'</script><!-- \"'& {{data}}"


def one(
    name: str,
    costs: Costs | None = None,
    ranks: int = 4,
    microbatches: int = 8,
    stages_per_rank: int | None = None,
) -> Timeline:
    plan = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    return simulate(plan, costs)


def data_of(page: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


# ---- The data -------------------------------------------------------------------------------


def test_nothing_comes_from_elsewhere() -> None:
    page = to_html([one("zbv")])
    assert not re.findall(r"https?://|//[a-z]+\.[a-z]", page)
    assert not re.findall(r"<(?:script|img|iframe)[^>]* src|@import|url\(", page)
    assert "default-src 'none'" in page


def test_timelines_that_cannot_share_a_page() -> None:
    with pytest.raises(PlanError, match="at least one"):
        to_html([])
    plan = build("gpipe", ranks=2, microbatches=2)
    with pytest.raises(CostError, match="'' and 'ms' do not share an axis"):
        to_html([simulate(plan), simulate(plan, Costs(unit="ms"))])


@pytest.mark.parametrize(
    "timeline",
    [
        one("1f1b"),
        one("dualpipev", ranks=4, microbatches=10),
        one("zbv", Costs(forward=1 / 3, backward_input=0.1, link=Link(latency=0.037))),
        simulate(lower(build("zbv", ranks=4, microbatches=8), keep_ready=1, reduce=True)),
        one("1f1b", Costs(forward=1e-6, backward_input=2e-6, backward_weight=2e-6), ranks=3),
    ],
    ids=["1f1b", "pairs", "thirds", "lowered", "tiny"],
)
def test_times_and_memory_survive(timeline: Timeline) -> None:
    columns = data_of(to_html([timeline]))["timelines"][0]
    rows, second = timeline.plan.rows, timeline.plan.rows.second_of_pair()
    drawn = np.flatnonzero((rows.kind <= Kind.W) & ~second)
    assert columns["kind"] == rows.kind[drawn].tolist()
    assert columns["stage"] == rows.stage[drawn].tolist()
    assert columns["microbatch"] == rows.microbatch[drawn].tolist()
    starts, exact = np.array(columns["start"]), 1e-6 * timeline.makespan
    np.testing.assert_allclose(starts, timeline.start[drawn], atol=exact)
    np.testing.assert_allclose(starts + columns["lasts"], timeline.end[drawn], atol=exact)
    during, after = memory_curve(timeline.plan, timeline.costs)
    last_of_pair = drawn + rows.joined[drawn]
    assert columns["after"] == pytest.approx(after[last_of_pair])
    assert columns["during"] == pytest.approx(during[last_of_pair])
    assert max(columns["during"]) == pytest.approx(timeline.peak_memory.max())
    assert len(columns["critical"]) == critical(timeline)


# ---- In the browser -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


class Viewer(Opened):
    name = "taktline"

    def view(self) -> tuple[float, float]:
        start, end = self("view()")
        return start, end

    def where(self, action: str, index: int = 0) -> tuple[float, float]:
        found = self(f"where({index}, '{action}')")
        assert found, f"{action} is not in view"
        return found["x"], found["y"]

    def hover(self, action: str, index: int = 0) -> str:
        self.page.mouse.move(*self.where(action, index))
        self.frame()
        return self.tip()

    def tip(self) -> str:
        return " ".join((self("tooltip()") or "").split())

    def wheel(self, dx: float, dy: float) -> None:
        """Turn the wheel with Ctrl held down."""
        self.page.keyboard.down("Control")
        self.page.mouse.wheel(dx, dy)
        self.page.keyboard.up("Control")
        self.frame()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
        self.frame()

    def pixel(self, x: float, y: float, index: int = 0) -> str:
        """The colour that is drawn there."""
        return self.page.evaluate(
            """([x, y, index]) => {
                const canvas = document.querySelectorAll("canvas.lanes")[index];
                const frame = canvas.getBoundingClientRect();
                const scale = canvas.width / frame.width;
                const at = [x - frame.left, y - frame.top].map((p) => -Math.floor(p * scale));
                const copy = new OffscreenCanvas(1, 1).getContext("2d");
                copy.drawImage(canvas, ...at);
                const rgb = [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3);
                return "#" + rgb.map((c) => c.toString(16).padStart(2, "0")).join("");
            }""",
            [x, y, index],
        )

    @property
    def canvas(self) -> Locator:
        return self.page.locator("canvas.lanes").first


PLAIN = one("1f1b")
PAIRS = one("dualpipev", ranks=4, microbatches=10)
KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)


@pytest.fixture(scope="module")
def opened(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    page = Viewer(chromium, tmp_path_factory.mktemp("page") / "plain.html", to_html([PLAIN]))
    yield page
    page.close()


@pytest.fixture
def plain(opened: Viewer) -> Viewer:
    """The page of one 1F1B timeline, as if just opened."""
    opened.page.mouse.move(2, 2)
    opened.page.evaluate("document.activeElement.blur()")
    opened.press("Escape", "0")
    return opened


@pytest.fixture
def show(chromium: Browser, tmp_path: Path) -> Iterator[Callable[..., Viewer]]:
    """Open another page, and close it afterwards."""
    pages: list[Viewer] = []

    def open_page(*timelines: Timeline, **options: Any) -> Viewer:
        pages.append(Viewer(chromium, tmp_path / "page.html", to_html(timelines), **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()


def critical(timeline: Timeline) -> int:
    rows = timeline.critical_rows()
    return int((timeline.plan.rows.kind[rows] <= Kind.W).sum())


@pytest.mark.processes
def test_loads_quietly(plain: Viewer) -> None:
    plain.reopen()
    plain.press("c", "m", "m", "?", "Escape")
    plain.hover("1B2")
    assert plain.noted == []


@pytest.mark.processes
def test_boxes_are_drawn_to_scale(plain: Viewer) -> None:
    assert plain("boxes()") == plain("visible()") == [len(PLAIN.plan)]
    assert plain("drawn()") == [{"boxes": 64, "merged": 0}]
    forward, backward = plain("where(0, '0F0')"), plain("where(0, '2B3')")
    assert backward["width"] + 1 == pytest.approx(2 * (forward["width"] + 1), abs=0.01)
    for action, kind in (("0F0", Kind.F), ("2B3", Kind.B)):
        x, y = plain.where(action)
        assert plain.pixel(x, y - 14) == shade(kind, 0, 1)
    x, y = plain.where("0F3")
    idle = {plain.pixel(x + 60 + step, y) for step in range(12)}
    assert len(idle) > 1  # hatched
    assert not idle & {shade(kind, 0, 1) for kind in KINDS}


@pytest.mark.processes
def test_an_overlapped_pair_is_one_box(show: Callable[..., Viewer]) -> None:
    page = show(PAIRS)
    joined = int(PAIRS.plan.rows.joined.sum())
    assert joined
    assert page("boxes()") == [len(PAIRS.plan)] == [len(PAIRS.plan.rows) - joined]
    first = int(np.flatnonzero(PAIRS.plan.rows.joined)[0])
    forward, backward = PAIRS.plan.rows.leaf(first), PAIRS.plan.rows.leaf(first + 1)
    assert page.where(str(forward)) == page.where(str(backward))
    tip = page.hover(str(forward))
    assert tip.startswith(f"{forward} + {backward} forward and backward, overlapped Rank 0")
    assert f"Micro-batch {forward.microbatch} and {backward.microbatch}" in tip
    x, y = page.where(str(forward))
    kinds = [page.pixel(x - 12, y + dy) for dy in (-10, 10)]
    stages = PAIRS.plan.placement.stages_of(0)
    assert kinds == [shade(leaf.kind, stages.index(leaf.stage), 2) for leaf in (forward, backward)]
    # Of the pair, a highlighted micro-batch has one half.
    page.page.fill("#microbatch", str(forward.microbatch))
    page.page.mouse.move(2, 2)
    page.frame()
    assert page.pixel(x - 12, y - 10) == kinds[0]
    assert page.pixel(x - 12, y + 10) != kinds[1]
    page.press("Escape", "c")
    assert page("critical()") == [critical(PAIRS)]


def boxes_of(timeline: Timeline, microbatch: int) -> int:
    """How many boxes compute for a micro-batch, a pair being one."""
    rows = timeline.plan.rows
    row = np.flatnonzero((rows.kind <= Kind.W) & (rows.microbatch == microbatch))
    return len(set((row - rows.second_of_pair()[row]).tolist()))


@pytest.mark.processes
def test_wheel_keys_and_buttons_zoom(plain: Viewer) -> None:
    x, y = plain.where("1B2")
    plain.page.mouse.move(x, y)
    plain.wheel(0, -66)
    start, end = plain.view()
    assert end - start == pytest.approx(33 * np.exp(-0.66), rel=1e-6)
    assert plain.where("1B2")[0] == pytest.approx(x, abs=1.5)
    assert plain("visible()")[0] < 64
    plain.wheel(0, 3000)
    plain.wheel(0, 3000)
    assert plain.view() == (0, 33)
    plain.press("+", "+", "-")
    assert plain.view() == pytest.approx((5.5, 27.5))
    plain.press("0")
    for button, span in (("#in", 22), ("#in", 44 / 3), ("#out", 22), ("#fit", 33)):
        plain.page.click(button)
        start, end = plain.view()
        assert end - start == pytest.approx(span)
    plain.page.mouse.dblclick(*plain.where("3B4"))
    plain.frame()
    start, end = plain.view()
    assert end - start == pytest.approx(16.5)
    assert plain("microbatch()") is None  # two clicks: highlighted, and not any more
    for _ in range(60):
        plain.page.keyboard.press("+")
    start, end = plain.view()
    assert end - start == pytest.approx(0.5)  # half of the shortest box, and no closer


@pytest.mark.processes
def test_dragging_and_arrows_pan(plain: Viewer) -> None:
    plain("look(10, 20)")
    plain.frame()
    x, y = plain.where("1B2")
    plain.page.mouse.move(x, y)
    plain.page.mouse.down()
    plain.page.mouse.move(x - 200, y + 30, steps=4)
    plain.page.mouse.up()
    plain.frame()
    start, end = plain.view()
    assert end - start == pytest.approx(10)
    assert start > 11
    assert plain("microbatch()") is None  # a drag is no click
    plain.press("ArrowLeft")
    assert plain.view()[0] == pytest.approx(start - 1.5)
    for _ in range(40):
        plain.page.keyboard.press("ArrowRight")
    assert plain.view() == pytest.approx((23, 33))  # not beyond the end


@pytest.mark.processes
def test_the_tip_says_what_an_action_waited_for(plain: Viewer) -> None:
    assert plain.hover("2F0") == (
        "2F0 forward Rank 2 Stage 2 Micro-batch 0 Start 2 Duration 1 waited 2 for 1F0 from rank 1"
    )
    assert plain.hover("0B0").endswith("Start 10 Duration 2 waited 6 for 1B0 from rank 1")
    assert plain.hover("3B6").endswith("Start 22 Duration 2 right after 3F6")
    assert plain.hover("0F0").endswith("first on its rank")
    # Beside the box, where its rank is idle.
    x, y = plain.where("0F3")
    plain.page.mouse.move(x + 100, y)
    plain.frame()
    assert plain.tip() == "idle Rank 0 From 4 Duration 6 0B0 waited 6 for 1B0 from rank 1"
    # Far below, its memory.
    plain.page.mouse.move(x + 100, plain.where("3F0")[1] + 63)
    plain.frame()
    assert plain.tip().startswith("memory, in micro-batches Rank 0 Time 6.4")
    assert plain.tip().endswith("In use 4 Peak 4")
    plain.page.mouse.move(2, 2)
    plain.frame()
    assert plain.tip() == ""


@pytest.mark.processes
def test_messages_take_time(show: Callable[..., Viewer]) -> None:
    plan = build("1f1b", ranks=2, microbatches=2)
    slow = Costs(link=Link(latency=0.5), unit="ms")
    blocking = replace(slow, comm_blocks=True, message_bytes=1)
    late = show(
        simulate(lower(plan, keep_ready=1), slow),
        simulate(lower(plan), blocking),
        viewport={"width": 1280, "height": 1800},
    )
    assert late.hover("1F0", 0).endswith(
        "Start 1.5 ms Duration 1 ms waited 1.5 ms for 0F0 from rank 0, whose message took 0.5 ms"
    )
    assert late.hover("0F1", 0).endswith("right after 0F0")
    assert late.hover("0F1", 1).endswith("waited 0.5 ms for 0SEND_F0")
    assert late.hover("1F0", 1).endswith("for 0F0 from rank 0, whose message took 0.5 ms")
    x, y = late.where("0F1", 1)
    box = late("where(1, '0F1')")
    late.page.mouse.move(x - box["width"] / 2 - 4, y + box["height"] / 2 - 1)
    late.frame()
    assert late.tip() == "0SEND_F0 send f Rank 0 Stage 0 Micro-batch 0 Start 1 ms Duration 0.5 ms"


@pytest.mark.processes
def test_a_micro_batch_is_followed(plain: Viewer) -> None:
    def colours() -> tuple[str, str]:
        (x, y), (u, v) = plain.where("2B3"), plain.where("2B4")
        return plain.pixel(x, y - 14), plain.pixel(u, v - 14)

    full = shade(Kind.B, 0, 1)
    assert colours() == (full, full)
    plain.page.mouse.click(*plain.where("2B3"))
    plain.page.mouse.move(2, 2)
    plain.frame()
    assert plain("microbatch()") == 3
    assert plain("highlighted()") == [boxes_of(PLAIN, 3)] == [8]
    assert plain.page.input_value("#microbatch") == "3"
    assert colours()[0] == full
    assert colours()[1] != full
    plain.page.fill("#microbatch", "4")
    plain.frame()
    assert plain("microbatch()") == 4
    assert colours()[1] == full
    plain.page.fill("#microbatch", "8")  # there are only 0 to 7
    assert plain("microbatch()") is None
    assert plain.page.get_attribute("#microbatch", "aria-invalid") == "true"
    plain.press("Escape")
    assert plain.page.input_value("#microbatch") == ""
    assert plain("highlighted()") == [0]
    assert colours() == (full, full)


@pytest.mark.processes
def test_the_keyboard_goes_from_box_to_box(plain: Viewer) -> None:
    live = plain.page.locator("#live")
    plain.page.focus("#ask")
    plain.press("Tab")
    assert plain.page.evaluate("document.activeElement.className") == "lanes"
    assert plain("selected()") == "0F0"
    plain.press("ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight")
    assert plain("selected()") == "0B0"
    assert live.inner_text() == (
        "0B0, backward, rank 0, stage 0, micro-batch 0, start 10, duration 2, "
        "waited 6 for 1B0 from rank 1"
    )
    assert plain.tip().startswith("0B0 backward")
    plain.press("ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "Enter")
    selected = plain("selected()")
    assert selected.startswith("3")
    assert plain("microbatch()") == int(selected[2:])
    plain("look(0, 3)")  # a box outside of the view is brought into it
    plain.press("ArrowRight")
    start, end = plain.view()
    assert start > 0
    assert end - start == pytest.approx(3)
    assert plain(f"where(0, '{plain('selected()')}')") is not None
    plain.press("Escape")
    assert (plain("selected()"), plain("microbatch()"), plain.tip()) == (None, None, "")


@pytest.mark.processes
def test_two_timelines_share_the_axis(show: Callable[..., Viewer]) -> None:
    other = one("zbv", HALF)
    both = show(PLAIN, other, color_scheme="dark")
    assert both("boxes()") == [len(PLAIN.plan), len(other.plan)]
    assert both.view() == (0, 33)

    def edge(action: str, index: int) -> float:
        box = both(f"where({index}, '{action}')")
        return box["x"] - box["width"] / 2

    def same_time() -> None:
        # Both start at 1: the third and the second of their rank.
        assert edge("0F1", 0) == pytest.approx(edge("0F2", 1), abs=0.01)

    same_time()
    both.page.mouse.move(*both.where("0F2", 1))
    both.wheel(0, -66)
    same_time()
    assert both.view() != (0, 33)
    assert both("visible()")[0] < len(PLAIN.plan)
    assert both("visible()")[1] < len(other.plan)
    both.page.fill("#microbatch", "2")
    assert both("highlighted()") == [boxes_of(PLAIN, 2), boxes_of(other, 2)]
    text = both.page.locator("section").nth(1).inner_text()
    assert "22.7% less than 1f1b" in text


@pytest.mark.processes
def test_fingers(show: Callable[..., Viewer]) -> None:
    phone = show(
        PLAIN,
        has_touch=True,
        is_mobile=True,
        viewport={"width": 390, "height": 844},
        device_scale_factor=2,
    )
    assert phone.page.evaluate("document.documentElement.scrollWidth") == 390
    x, y = phone.where("2B3")
    phone.page.touchscreen.tap(x, y)
    phone.frame()
    assert phone.tip().startswith("2B3 backward Rank 2")
    assert phone("microbatch()") == 3
    assert phone("highlighted()") == [8]
    # Two fingers that part zoom in.
    session = phone.context.new_cdp_session(phone.page)

    def touch(kind: str, *places: float) -> None:
        points = [{"x": place, "y": y, "id": number} for number, place in enumerate(places)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 180, 220)
    for apart in range(20, 90, 10):
        touch("touchMove", 200 - apart, 200 + apart)
    touch("touchEnd")
    phone.frame()
    start, end = phone.view()
    assert end - start == pytest.approx(33 / 4, rel=0.1)


@pytest.mark.processes
def test_a_hundred_thousand_actions(show: Callable[..., Viewer]) -> None:
    many = one("interleaved_1f1b", ranks=8, stages_per_rank=2, microbatches=3125)
    assert len(many.plan) == 100_000
    page = show(many)
    assert page("boxes()") == page("visible()") == [100_000]
    assert page("drawn()") == [{"boxes": 0, "merged": 100_000}]
    compute, middle = many.plan.rows.kind <= Kind.W, 9_000.0
    seen = page.page.evaluate(
        """async (middle) => {
            const seen = [], whole = taktline.view()[1];
            for (let k = 0; k < 60; k++) {
                const span = whole * 0.001 ** (k / 59);
                taktline.look(middle - span / 3 + k, middle + span / 1.5 + k);
                await new Promise(requestAnimationFrame);
                taktline.draw();
                const drawn = taktline.drawn()[0];
                const [from, to] = taktline.view();
                seen.push([from, to, taktline.visible()[0], drawn.boxes + drawn.merged]);
            }
            return seen;
        }""",
        middle,
    )
    assert len(seen) == 60
    for start, end, visible, drawn in seen:
        inside = compute & (many.end > start) & (many.start < end)
        assert visible == drawn == int(inside.sum())
    assert seen[-1][1] - seen[-1][0] == pytest.approx(many.makespan / 1000)


@pytest.mark.processes
def test_a_name_cannot_break_out(show: Callable[..., Viewer]) -> None:
    plan = Plan.from_actions([["0F0", "0B0"], ["1F0", "1B0"]], name=NASTY)
    page = show(simulate(plan, Costs(unit="<b>")))
    assert page.page.title() == NASTY
    assert page.page.locator("h2").first.inner_text() == NASTY
    assert page("boxes()") == [4]
    assert page.hover("1F0").endswith("waited 1 <b> for 0F0 from rank 0")
