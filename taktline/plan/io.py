"""Plans and timelines as files: CSV in torch's dialect, and JSON with more fields.

CSV has one row per rank and one action per cell; empty cells are ignored, and so are torch's waits
for a send or a reduction. JSON adds the placement, the number of micro-batches, the plan's origin
and, if known, costs. A timeline is the JSON of its plan, and when each action started and ended.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from taktline.checks import Either, check, conform, loads, shown
from taktline.errors import (
    ActionSyntaxError,
    ArgumentError,
    CostError,
    JsonError,
    PlanError,
    PlanFileError,
)
from taktline.plan.action import Action, Overlap, parse
from taktline.plan.costs import Costs
from taktline.plan.plan import Level, Placement, Plan
from taktline.plan.timeline import Timeline

_FORMAT, _TIMELINE_FORMAT, _VERSION = "taktline-plan", "taktline-timeline", 1
_COLUMNS = ("start", "end", "arrival")
_LEVELS = {level.name.lower(): level for level in Level}
_PLAN = {
    **{"ranks": [[str]], "level": str, "placement": [int], "microbatches": int, "origin": str},
    **{"costs": Either(None, {str: object}), "cuts": Either(None, [str])},
}
_TIMELINE = {
    **{"start": [[float]], "end": [[float]], "arrival": Either(None, [[float]]), "measured": bool},
    **_PLAN,
}
_WAIT = re.compile(r"[0-9]+WAIT_(SEND_[FB][0-9]+|REDUCE_GRAD)")


def read(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file, CSV or JSON by its ending.

    >>> read("no-such-plan.csv")
    Traceback (most recent call last):
    taktline.errors.PlanFileError: no-such-plan.csv: cannot be read: No such file or directory
    """
    path = _path(path)
    return _plan(_fields(path), path)


def read_costs(path: str | os.PathLike[str]) -> Costs | None:
    """The costs in a JSON plan file, if it has any; a CSV file has none.

    >>> read_costs("plan.csv") is None
    True
    """
    path = _path(path)
    return _costs(_fields(path), path) if _is_json(path) else None


def read_cuts(path: str | os.PathLike[str]) -> list[str] | None:
    """The names of the submodules with which stages begin, if a JSON plan file has them.

    >>> read_cuts("no-such-plan.json")
    Traceback (most recent call last):
    taktline.errors.PlanFileError: no-such-plan.json: cannot be read: No such file or directory
    """
    return _fields(_path(path))["cuts"]


def write(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    costs: Costs | None = None,
    cuts: Sequence[str] | None = None,
) -> None:
    """Write a plan to a file, CSV or JSON by its ending: all of it or nothing.

    ``cuts`` are the names of the submodules with which stages begin, for a JSON file.

    >>> from tempfile import TemporaryDirectory
    >>> from taktline.plan import build
    >>> plan = build("1f1b", ranks=2, microbatches=2)
    >>> with TemporaryDirectory() as folder:
    ...     write(plan, f"{folder}/plan.json", costs=Costs(forward=2.0))
    ...     read(f"{folder}/plan.json") == plan, read_costs(f"{folder}/plan.json").forward
    (True, 2.0)
    """
    path = _path(path)
    if costs is not None and not _is_json(path):
        raise PlanFileError(path, "a CSV file cannot hold costs; use .json")
    if cuts is not None and not _is_json(path):
        raise PlanFileError(path, "a CSV file cannot hold cuts; use .json")
    more = None if cuts is None else {"cuts": [*cuts]}
    write_text(path, to_json(plan, costs, more) if _is_json(path) else to_csv(plan))


def write_timeline(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a timeline, measured or simulated, to a .json file: all of it or nothing.

    >>> from tempfile import TemporaryDirectory
    >>> from taktline.plan import build, simulate
    >>> with TemporaryDirectory() as folder:
    ...     write_timeline(simulate(build("1f1b", ranks=4, microbatches=8)), f"{folder}/a.json")
    ...     read_timeline(f"{folder}/a.json").makespan
    33.0
    """
    plan = check("timeline", timeline, Timeline).plan
    path = _path(path, ".json")
    more: dict[str, Any] = {"format": _TIMELINE_FORMAT, "measured": timeline.measured}
    for name in _COLUMNS:
        if (column := getattr(timeline, name)) is not None:
            more[name] = [part.tolist() for part in np.split(column, plan.offsets[1:-1])]
    write_text(path, to_json(plan, timeline.costs, more))


def read_timeline(path: str | os.PathLike[str]) -> Timeline:
    """The timeline in a .json file.

    >>> read_timeline("no-such-timeline.json")
    Traceback (most recent call last):
    taktline.errors.PlanFileError: no-such-timeline.json: cannot be read: No such file or directory
    """
    path = _path(path, ".json")
    data = _fields(path)
    if data["format"] != _TIMELINE_FORMAT:
        raise PlanFileError(path, "holds a plan and no times; taktline.plan.read reads it")
    plan, costs, columns = _plan(data, path), _costs(data, path), dict[str, Any]()
    for name in ("start", "end") if data["arrival"] is None else _COLUMNS:
        if [len(part) for part in data[name]] != np.diff(plan.offsets).tolist():
            raise PlanFileError(path, f"{name} must have a number for each action of each rank")
        columns[name] = [number for part in data[name] for number in part]
    with _errors_of(path):
        timeline = Timeline(plan, costs=costs or Costs(), measured=data["measured"], **columns)
    if (timeline.end < timeline.start).any():
        raise PlanFileError(path, "an action ends before it starts")
    return timeline


def is_timeline(path: str | os.PathLike[str]) -> bool:
    """Whether a file holds a timeline, and not only a plan."""
    path = _path(path)
    return _is_json(path) and _fields(path)["format"] == _TIMELINE_FORMAT


def to_csv(plan: Plan) -> str:
    """A plan as CSV text."""
    check("plan", plan, Plan)
    text = io.StringIO()
    csv.writer(text).writerows(plan[rank] for rank in range(plan.ranks))
    return text.getvalue()


def from_csv(text: str, path: str | os.PathLike[str] = "<text>") -> Plan:
    """A plan from CSV text; the path is for messages, and its stem names the plan."""
    path = check("path", path, Path)
    return _plan(_csv_fields(text, path), path)


def to_json(plan: Plan, costs: Costs | None = None, more: dict[str, Any] | None = None) -> str:
    """A plan as JSON text, with a line for each field, and for each rank where a field has those.

    ``more`` are fields that are added or replaced.
    """
    check("plan", plan, Plan)
    fields: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "origin": plan.name,
        "level": plan.level.name.lower(),
        "microbatches": plan.microbatches,
        "placement": list(plan.placement.rank_of),
    }
    if costs is not None:
        fields["costs"] = check("costs", costs, Costs).to_dict()
    fields["ranks"] = [[str(action) for action in plan[rank]] for rank in range(plan.ranks)]
    lines: list[str] = []
    for name, value in (fields | (more or {})).items():
        text = json.dumps(value)
        if isinstance(value, list) and all(isinstance(part, list) for part in cast(Any, value)):
            text = "[\n    " + ",\n    ".join(map(json.dumps, cast(Any, value))) + "\n  ]"
        lines.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str, path: str | os.PathLike[str] = "<text>") -> Plan:
    """A plan from JSON text; the path is for messages."""
    path = check("path", path, Path)
    return _plan(_json_fields(text, path), path)


def _fields(path: Path) -> dict[str, Any]:
    """The fields of a file, in any format; those that a CSV file does not have are None."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PlanFileError(path, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PlanFileError(path, f"is not a text in UTF-8 (byte {error.start})") from None
    return (_json_fields if _is_json(path) else _csv_fields)(text, path)


def _csv_fields(text: str, path: Path) -> dict[str, Any]:
    reader = csv.reader(io.StringIO(text), strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise PlanFileError(path, f"not CSV: {error}", row=reader.line_num) from None
    while rows and not any(map(str.strip, rows[-1])):
        rows.pop()
    # A file's name may hold bytes that are not a text.
    name = os.fsencode(path.stem).decode("utf-8", "replace")
    return {**dict.fromkeys(_PLAN), "format": "csv", "origin": name, "ranks": rows}


def _json_fields(text: str, path: Path) -> dict[str, Any]:
    """The fields of a format and a version that are known here."""
    with _errors_of(path):
        data = conform(loads(text, what=str(path)), {str: object}, what=str(path))
        shape = {_FORMAT: _PLAN, _TIMELINE_FORMAT: _TIMELINE}.get(str(data.get("format")))
        if shape is None:
            raise PlanError(f'not a plan: expected "format": "{_FORMAT}"')
        version = data.get("version")
        if type(version) is not int or version != _VERSION:
            raise PlanError(
                f"has version {shown(version)} of the format, but this program reads "
                f"version {_VERSION}; use the Taktline that wrote it, or write it as CSV there"
            )
        fields = conform({name: data.get(name) for name in shape}, shape, what=str(path))
        if fields["level"] not in _LEVELS:
            known = ", ".join(_LEVELS)
            raise PlanError(f"level is one of {known}, not {shown(fields['level'])}")
        return {**fields, "format": data["format"]}


def _plan(data: dict[str, Any], path: Path) -> Plan:
    ranks: list[list[Action | Overlap]] = []
    for row, cells in enumerate(data["ranks"], start=1):
        ranks.append([])
        for column, cell in enumerate(map(str.strip, cells), start=1):
            if cell and not _WAIT.fullmatch(cell):
                try:
                    ranks[-1].append(parse(cell))
                except (ActionSyntaxError, PlanError) as error:
                    raise PlanFileError(path, str(error), row=row, column=column) from None
    with _errors_of(path):
        held, level, number = data["placement"], data["level"], data["microbatches"]
        placement = None if held is None else Placement.custom(held, len(ranks))
        level = None if level is None else _LEVELS[level]
        return Plan.from_actions(ranks, placement, number, level=level, name=data["origin"])


def _costs(data: dict[str, Any], path: Path) -> Costs | None:
    with _errors_of(path, "costs: "):
        return None if data["costs"] is None else Costs.from_dict(data["costs"])


@contextmanager
def _errors_of(path: Path, prefix: str = "") -> Generator[None]:
    """Let errors name the file, and where in it they are if that is known."""
    try:
        yield
    except JsonError as error:
        raise PlanFileError(path, error.reason, row=error.row, column=error.column) from None
    except (ArgumentError, CostError, PlanError) as error:
        raise PlanFileError(path, f"{prefix}{error}") from None


def _path(path: object, *endings: str) -> Path:
    path, endings = check("path", path, Path), endings or (".csv", ".json")
    if path.suffix.lower() not in endings:
        raise PlanFileError(path, f"ends in {' or '.join(endings)}, not in {path.suffix!r}")
    return path


def _is_json(path: Path) -> bool:
    return path.suffix.lower() == ".json"


def write_text(path: Path, text: str) -> None:
    """Write a text beside the target, then rename: a reader sees the old file or the new one."""
    target = Path(os.path.realpath(path))
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    try:
        with open(temporary, "x", encoding="utf-8", newline="") as file:
            if target.exists():
                shutil.copymode(target, temporary)
            file.write(text)
        os.replace(temporary, target)
    except OSError as error:
        raise PlanFileError(path, f"cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):  # it is gone if all went well
            temporary.unlink()
