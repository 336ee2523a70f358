"""Writes plans and timelines to files, shows them in a browser, and draws them in notebooks."""

from __future__ import annotations

import csv
import io
import os
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from taktline.checks import check
from taktline.errors import PlanFileError
from taktline.plan.io import write, write_text, write_timeline
from taktline.plan.plan import Plan
from taktline.plan.timeline import Timeline, simulate
from taktline.plan.validate import validate
from taktline.render.html import to_html
from taktline.render.svg import natural_width, to_svg
from taktline.render.text import chart

_PAGE = 960.0
"""Pixels of a notebook's cell."""
_MOST = 20_000
"""Actions that a browser draws at once without effort."""


def save(
    timelines: Sequence[Timeline], path: str | os.PathLike[str], *, width: float | None = None
) -> Path:
    """Write timelines to a file, whose ending says how: .html, .svg, .csv or .json.

    The last two hold a single timeline; .json is what ``read_timeline`` reads. ``width`` is that of
    a picture, in pixels.
    """
    path = check("path", path, Path)
    ending = path.suffix.lower()
    if ending in (".csv", ".json") and len(timelines) != 1:
        raise PlanFileError(path, "holds one timeline; draw several as .html or .svg")
    if ending == ".html":
        write_text(path, to_html(timelines))
    elif ending == ".svg":
        write_text(path, to_svg(timelines, width=width))
    elif ending == ".csv":
        write_text(path, to_csv(timelines[0]))
    elif ending == ".json":
        write_timeline(timelines[0], path)
    else:
        raise PlanFileError(path, f"ends in .html, .svg, .csv or .json, not in {ending!r}")
    return path


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> Path:
    """Write a plan as .csv or .json, or draw it as it runs if all stages take equally long."""
    path = check("path", path, Path)
    if path.suffix.lower() not in (".csv", ".json"):
        return save([simulate(plan)], path)
    write(plan, path)
    return path


def to_csv(timeline: Timeline) -> str:
    """A line for each action, for spreadsheets and data frames.

    >>> from taktline.plan import build, simulate
    >>> print(to_csv(simulate(build("1f1b", ranks=1, microbatches=1))).replace("\\r", ""))
    rank,action,kind,stage,microbatch,start,end
    0,0F0,F,0,0,0.0,1.0
    0,0B0,B,0,0,1.0,3.0
    <BLANKLINE>
    """
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["rank", "action", "kind", "stage", "microbatch", "start", "end"])
    for rank in range(timeline.plan.ranks):
        for span in timeline.spans(rank):
            action = span.action
            which = [action.kind.name, action.stage, action.microbatch]
            writer.writerow([rank, action, *which, span.start, span.end])
    return text.getvalue()


def show(timelines: Sequence[Timeline]) -> None:
    """Open the page in a browser; without one, print the chart."""
    folder = tempfile.mkdtemp(prefix="taktline-")
    page = save(timelines, Path(folder) / "timeline.html")
    if not webbrowser.open(page.as_uri()):
        print(chart(timelines))


def show_plan(plan: Plan) -> None:
    """Show a plan as it runs if all stages take equally long."""
    show([simulate(plan)])


def inline(timeline: Timeline) -> str | None:
    """A drawing for a notebook, as wide as its page; None if it would be too much for it."""
    if len(timeline.plan.rows) > _MOST:
        return None
    return to_svg([timeline], width=min(natural_width([timeline]), _PAGE))


def inline_plan(plan: Plan) -> str | None:
    """A plan in a notebook; None if it cannot run."""
    return None if validate(plan) else inline(simulate(plan))
