"""Writes plans and timelines to files, shows them in a browser, and draws them in notebooks."""

from __future__ import annotations

import os
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from taktline.checks import check
from taktline.errors import PlanFileError
from taktline.plan.io import TRACE, write, write_text, write_timeline
from taktline.plan.plan import Plan
from taktline.plan.timeline import Timeline, simulate
from taktline.plan.validate import validate
from taktline.render.html import to_html
from taktline.render.svg import natural_width, to_svg
from taktline.render.text import chart
from taktline.render.trace import to_trace

_PAGE = 960.0
"""Pixels of a notebook's cell."""
_MOST = 20_000
"""Actions that a browser draws at once without effort."""


Drawn: TypeAlias = Plan | Timeline | Sequence[Timeline]


def _timelines(drawn: Drawn) -> Sequence[Timeline]:
    """What is drawn; a plan as it runs if all stages take equally long."""
    if isinstance(drawn, Plan):
        return [simulate(drawn)]
    return [drawn] if isinstance(drawn, Timeline) else drawn


def save(drawn: Drawn, path: str | os.PathLike[str], *, width: float | None = None) -> Path:
    """Write plans or timelines to a file; its ending says how: .html, .svg or .perfetto.json.

    A .json file holds one of them to be read again, and a .csv file one plan. ``width`` is that of
    a picture, in pixels.
    """
    path = check("path", path, Path)
    trace, ending = path.name.lower().endswith(TRACE), path.suffix.lower()
    if isinstance(drawn, Plan) and ending in (".csv", ".json") and not trace:
        write(drawn, path)
        return path
    timelines = _timelines(drawn)
    if trace:
        write_text(path, to_trace(timelines))
    elif ending == ".html":
        write_text(path, to_html(timelines))
    elif ending == ".svg":
        write_text(path, to_svg(timelines, width=width))
    elif ending != ".json":
        raise PlanFileError(
            path, f"ends in .html, .svg, .json or {TRACE}, or .csv for a plan, not {ending!r}"
        )
    elif len(timelines) != 1:
        raise PlanFileError(path, f"holds one timeline; draw several as .html, .svg or {TRACE}")
    else:
        write_timeline(timelines[0], path)
    return path


def show(drawn: Drawn) -> None:
    """Open a page in a browser; without one, print a chart."""
    timelines = _timelines(drawn)
    page = save(timelines, Path(tempfile.mkdtemp(prefix="taktline-")) / "timeline.html")
    if not webbrowser.open(page.as_uri()):
        print(chart(timelines))


def inline(drawn: Plan | Timeline) -> str | None:
    """A drawing as wide as a notebook; None if it is too large, or of a plan that cannot run."""
    if isinstance(drawn, Plan) and validate(drawn):
        return None
    timelines = _timelines(drawn)
    if len(timelines[0].plan.rows) > _MOST:
        return None
    return to_svg(timelines, width=min(natural_width(timelines), _PAGE))
