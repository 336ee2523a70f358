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
from taktline.errors import JsonError, PlanError, PlanFileError, TaktlineError
from taktline.plan.action import Action, Overlap, parse
from taktline.plan.costs import Costs
from taktline.plan.plan import Level, Placement, Plan
from taktline.plan.timeline import Timeline

TRACE = ".perfetto.json"
"""The ending of a trace for Perfetto, which is neither a plan nor a timeline."""
_FORMAT, _TIMELINE_FORMAT, _VERSION = "taktline-plan", "taktline-timeline", 1
_LEVELS = {level.name.lower(): level for level in Level}
_PLAN = {
    **{"ranks": [[str]], "level": str, "placement": [int], "microbatches": int, "origin": str},
    **{"costs": Either(None, {str: object}), "cuts": Either(None, [str])},
}
_TIMELINE = {
    **{"start": [[float]], "end": [[float]], "arrival": Either(None, [[float]]), "measured": bool},
    **_PLAN,
}
_SHAPES = {_FORMAT: _PLAN, _TIMELINE_FORMAT: _TIMELINE}
_WAIT = re.compile(r"[0-9]+WAIT_(SEND_[FB][0-9]+|REDUCE_GRAD)")


def read(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file, CSV or JSON by its ending.

    >>> read("no-such-plan.csv")
    Traceback (most recent call last):
    taktline.errors.PlanFileError: no-such-plan.csv: cannot be read: No such file or directory
    """
    with _fields_of(path) as fields:
        return _plan(fields)


def read_costs(path: str | os.PathLike[str]) -> Costs | None:
    """The costs in the file of a plan or a timeline, if it has any; a CSV file has none.

    >>> read_costs("no-such-plan.json")
    Traceback (most recent call last):
    taktline.errors.PlanFileError: no-such-plan.json: cannot be read: No such file or directory
    """
    with _fields_of(path) as fields:
        return _costs(fields)


def read_timeline(path: str | os.PathLike[str]) -> Timeline:
    """The timeline in a .json file.

    >>> read_timeline("no-such-timeline.json")
    Traceback (most recent call last):
    taktline.errors.PlanFileError: no-such-timeline.json: cannot be read: No such file or directory
    """
    with _fields_of(path, ".json") as fields:
        if fields["format"] != _TIMELINE_FORMAT:
            raise PlanError("holds a plan and no times; taktline.plan.read reads it")
        plan, columns = _plan(fields), dict[str, Any]()
        for name in ("start", "end", "arrival"):
            column = fields[name]
            if column is not None:
                if [len(part) for part in column] != np.diff(plan.offsets).tolist():
                    raise PlanError(f"{name} must have a number for each action of each rank")
                column = [number for part in column for number in part]
            columns[name] = column
        costs = _costs(fields) or Costs()
        timeline = Timeline(plan, costs=costs, measured=fields["measured"], **columns)
        if (timeline.end < timeline.start).any():
            raise PlanError("an action ends before it starts")
        return timeline


def is_timeline(path: str | os.PathLike[str]) -> bool:
    """Whether a file holds a timeline, and not only a plan."""
    with _fields_of(path) as fields:
        return fields["format"] == _TIMELINE_FORMAT


def read_cuts(path: str | os.PathLike[str]) -> list[str] | None:
    """The names of the submodules with which stages begin, if a plan file has them.

    >>> read_cuts("no-such-plan.json")
    Traceback (most recent call last):
    taktline.errors.PlanFileError: no-such-plan.json: cannot be read: No such file or directory
    """
    with _fields_of(path) as fields:
        return fields["cuts"]


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
    if _is_json(path):
        write_text(path, to_json(plan, costs, cuts))
    elif costs is None and cuts is None:
        write_text(path, to_csv(plan))
    else:
        what = "costs" if cuts is None else "cuts"
        raise PlanFileError(path, f"a CSV file cannot hold {what}; use .json")


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
    columns = {"start": timeline.start, "end": timeline.end, "arrival": timeline.arrival}
    fields = {
        **_values(plan, timeline.costs),
        **{"format": _TIMELINE_FORMAT, "measured": timeline.measured},
        **{
            name: [part.tolist() for part in np.split(column, plan.offsets[1:-1])]
            for name, column in columns.items()
            if column is not None
        },
    }
    write_text(_path(path, ".json"), _text(fields))


def to_csv(plan: Plan) -> str:
    """A plan as CSV text."""
    text = io.StringIO()
    csv.writer(text).writerows(plan[rank] for rank in range(check("plan", plan, Plan).ranks))
    return text.getvalue()


def to_json(plan: Plan, costs: Costs | None = None, cuts: Sequence[str] | None = None) -> str:
    """A plan as JSON text: a line for each field, and for each rank in a field that has ranks."""
    return _text(_values(check("plan", plan, Plan), costs, cuts))


def from_json(text: str) -> Plan:
    """The plan in a JSON text."""
    return _plan(_json_fields(text))


def _values(plan: Plan, costs: Costs | None, cuts: Sequence[str] | None = None) -> dict[str, Any]:
    known: dict[str, Any] = {} if cuts is None else {"cuts": [*cuts]}
    if costs is not None:
        known["costs"] = check("costs", costs, Costs).to_dict()
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "origin": plan.name,
        "level": plan.level.name.lower(),
        "microbatches": plan.microbatches,
        "placement": list(plan.placement.rank_of),
        **known,
        "ranks": [[str(action) for action in plan[rank]] for rank in range(plan.ranks)],
    }


def _text(fields: dict[str, Any]) -> str:
    lines: list[str] = []
    for name, value in fields.items():
        text = json.dumps(value)
        if isinstance(value, list) and all(isinstance(part, list) for part in cast(Any, value)):
            text = "[\n    " + ",\n    ".join(map(json.dumps, cast(Any, value))) + "\n  ]"
        lines.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


@contextmanager
def _fields_of(path: object, *endings: str) -> Generator[dict[str, Any]]:
    """The fields of a file; errors then name it, and where in it they are if that is known."""
    path = _path(path, *endings)
    try:
        text = path.read_text(encoding="utf-8-sig")
        yield _json_fields(text) if _is_json(path) else _csv_fields(text, path)
    except JsonError as error:
        raise PlanFileError(path, error.reason, row=error.row, column=error.column) from None
    except OSError as error:
        raise PlanFileError(path, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PlanFileError(path, f"is not a text in UTF-8 (byte {error.start})") from None
    except TaktlineError as error:
        raise PlanFileError(path, str(error)) from None


def _csv_fields(text: str, path: Path) -> dict[str, Any]:
    """The actions of each rank; a CSV file does not have the other fields."""
    reader = csv.reader(io.StringIO(text), strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise JsonError(path, f"not CSV: {error}", row=reader.line_num) from None
    while rows and not any(map(str.strip, rows[-1])):
        rows.pop()
    # A file's name may hold bytes that are not a text.
    name = os.fsencode(path.stem).decode("utf-8", "replace")
    return {**dict.fromkeys(_PLAN), "format": "csv", "origin": name, "ranks": rows}


def _json_fields(text: str) -> dict[str, Any]:
    """The fields of a format and a version that are known here."""
    data = conform(loads(text, what="the file"), {str: object}, what="the file")
    format, version = str(data.get("format")), data.get("version")
    if "traceEvents" in data:
        raise PlanError(f"not a plan but a trace for Perfetto, which ends in {TRACE}")
    if format not in _SHAPES:
        raise PlanError(f'not a plan: expected "format": "{_FORMAT}"')
    if type(version) is not int or version != _VERSION:
        raise PlanError(
            f"has version {shown(version)} of the format, but this program reads version "
            f"{_VERSION}; use the Taktline that wrote it, or write it as CSV there"
        )
    shape = _SHAPES[format]
    fields = conform({name: data.get(name) for name in shape}, shape, what="the file")
    if fields["level"] not in _LEVELS:
        raise PlanError(f"level is one of {', '.join(_LEVELS)}, not {shown(fields['level'])}")
    return {**fields, "format": format}


def _plan(fields: dict[str, Any]) -> Plan:
    ranks: list[list[Action | Overlap]] = []
    for row, cells in enumerate(fields["ranks"], start=1):
        ranks.append([])
        for column, cell in enumerate(map(str.strip, cells), start=1):
            if cell and not _WAIT.fullmatch(cell):
                try:
                    ranks[-1].append(parse(cell))
                except TaktlineError as error:
                    raise JsonError("the file", str(error), row=row, column=column) from None
    held, level, number = fields["placement"], fields["level"], fields["microbatches"]
    placement = None if held is None else Placement.custom(held, len(ranks))
    level = None if level is None else _LEVELS[level]
    return Plan.from_actions(ranks, placement, number, level=level, name=fields["origin"])


def _costs(fields: dict[str, Any]) -> Costs | None:
    return None if fields["costs"] is None else Costs.from_dict(fields["costs"])


def _path(path: object, *endings: str) -> Path:
    path, endings = check("path", path, Path), endings or (".csv", ".json")
    if path.name.lower().endswith(TRACE):
        raise PlanFileError(
            path, f"{TRACE} is the ending of a trace for Perfetto; plans and timelines end in .json"
        )
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
