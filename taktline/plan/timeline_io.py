"""Timelines as files: the JSON of their plan, and when each action started and ended."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from taktline.checks import Either, require_instance, require_path
from taktline.errors import InvalidPlanError, PlanFileError
from taktline.plan.costs import Costs
from taktline.plan.io import (
    TIMELINE_FORMAT,
    costs_from,
    json_object,
    layout,
    plan_fields,
    plan_from,
    read_text,
    take,
    write_text,
)
from taktline.plan.plan import Plan
from taktline.plan.rows import FloatArray
from taktline.plan.timeline import Timeline

_COLUMN = [[float]]
_TIMES = {"start": _COLUMN, "end": _COLUMN, "arrival": Either(None, _COLUMN), "measured": bool}


def write_timeline(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a timeline, measured or simulated, to a .json file: all of it or nothing.

    >>> from tempfile import TemporaryDirectory
    >>> from taktline.plan import build, simulate
    >>> with TemporaryDirectory() as folder:
    ...     write_timeline(simulate(build("1f1b", ranks=4, microbatches=8)), f"{folder}/a.json")
    ...     read_timeline(f"{folder}/a.json").makespan
    33.0
    """
    plan = require_instance("timeline", timeline, Timeline).plan
    path = require_path("path", path)
    _require_json(path)
    fields = plan_fields(plan, timeline.costs)
    fields |= {"format": TIMELINE_FORMAT, "measured": timeline.measured}
    times = {"start": timeline.start, "end": timeline.end, "arrival": timeline.arrival}
    for name, column in times.items():
        if column is not None:
            fields[name] = [part.tolist() for part in np.split(column, plan.offsets[1:-1])]
    write_text(path, layout(fields))


def read_timeline(path: str | os.PathLike[str]) -> Timeline:
    """The timeline in a .json file.

    >>> read_timeline("no-such-timeline.json")
    Traceback (most recent call last):
    taktline.errors.PlanFileError: no-such-timeline.json: cannot be read: No such file or directory
    """
    path = require_path("path", path)
    _require_json(path)
    data = json_object(read_text(path), path)
    if data["format"] != TIMELINE_FORMAT:
        raise PlanFileError(path, "holds a plan and no times; taktline.plan.read reads it")
    plan = plan_from(data, path)
    fields = take({"measured": False, **data}, _TIMES, path)
    start, end = (_column(fields[name], name, plan, path) for name in ("start", "end"))
    if (end < start).any():
        raise PlanFileError(path, "an action ends before it starts")
    late = fields["arrival"]
    arrival = None if late is None else _column(late, "arrival", plan, path)
    costs, measured = costs_from(data, path) or Costs(), fields["measured"]
    try:
        return Timeline(plan, start, end, costs, arrival, measured=measured)
    except InvalidPlanError as error:
        raise PlanFileError(path, str(error)) from None


def is_timeline(path: str | os.PathLike[str]) -> bool:
    """Whether a file holds a timeline, and not only a plan."""
    path = require_path("path", path)
    if path.suffix.lower() != ".json":
        return False
    return json_object(read_text(path), path)["format"] == TIMELINE_FORMAT


def _column(parts: list[list[float]], name: str, plan: Plan, path: Path) -> FloatArray:
    """One number a row; an overlapped pair has two rows."""
    if [len(part) for part in parts] != np.diff(plan.offsets).tolist():
        raise PlanFileError(path, f"{name} must have a number for each action of each rank")
    try:
        return np.array([number for part in parts for number in part], np.float64)
    except OverflowError:
        raise PlanFileError(path, f"{name} holds a number that is too large") from None


def _require_json(path: Path) -> None:
    if path.suffix.lower() != ".json":
        raise PlanFileError(path, f"a timeline's file ends in .json, not {path.suffix!r}")
