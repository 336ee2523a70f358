"""Plans and timelines as files, on the screen, and in a notebook."""

from __future__ import annotations

import re
import webbrowser
from pathlib import Path

import pytest

from taktline.errors import PlanFileError
from taktline.plan import build, read, read_timeline, simulate
from taktline.render.files import save

PLAN = build("zbv", ranks=2, microbatches=4)
TIMELINE = simulate(PLAN)


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("x.html", b"<!doctype html>"),
        ("x.svg", b"<svg "),
        ("x.SVG", b"<svg "),
        ("x.json", b"{"),
    ],
)
def test_the_ending_says_what_is_written(tmp_path: Path, name: str, beginning: bytes) -> None:
    assert TIMELINE.save(tmp_path / name) == tmp_path / name
    assert (tmp_path / name).read_bytes().startswith(beginning)


def test_what_is_saved_can_be_read(tmp_path: Path) -> None:
    assert read_timeline(TIMELINE.save(tmp_path / "x.json")).makespan == TIMELINE.makespan
    for name in ("x.csv", "x.json"):
        assert read(PLAN.save(tmp_path / name)) == PLAN
    assert PLAN.save(tmp_path / "x.svg").read_text() == TIMELINE.to_svg()


def test_endings_that_nobody_knows(tmp_path: Path) -> None:
    for thing, name in ((PLAN, "x.pdf"), (TIMELINE, "x.png"), (TIMELINE, "x.csv")):
        with pytest.raises(PlanFileError, match=r"\.json or \.perfetto\.json, or \.csv for"):
            thing.save(tmp_path / name)
    with pytest.raises(PlanFileError, match="holds one timeline"):
        save([TIMELINE, TIMELINE], tmp_path / "x.json")


@pytest.mark.parametrize("works", [True, False])
def test_show(
    works: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or works)
    PLAN.show()
    page = Path(opened[0].removeprefix("file://"))
    assert page.read_text().startswith("<!doctype html>")
    assert ("rank 0 │" in capsys.readouterr().out) == (not works)


def test_in_a_notebook() -> None:
    wide = simulate(build("interleaved_1f1b", ranks=8, microbatches=64))
    for thing in (TIMELINE, PLAN, wide):
        drawing = thing._repr_svg_()
        assert drawing is not None
        found = re.match(r"<svg [^>]* width='([\d.]+)'", drawing)
        assert found is not None
        assert float(found[1]) <= 960
    assert simulate(build("1f1b", ranks=64, microbatches=512))._repr_svg_() is None
