"""Plans as files: CSV in torch's dialect, and JSON with more fields.

CSV has one row per rank and one action per cell; empty cells are ignored. JSON adds the placement,
the number of micro-batches, the plan's origin and, if known, costs.
"""

from __future__ import annotations

import csv
import io
import json
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from taktline.checks import conform, require_instance, require_path, require_text, shown
from taktline.checks import read as read_json
from taktline.errors import ActionSyntaxError, CostError, JsonError, PlanError, PlanFileError
from taktline.plan.action import Action, Overlap, parse
from taktline.plan.costs import Costs
from taktline.plan.placement import MOST_RANKS, Placement
from taktline.plan.plan import Level, Plan

FORMAT, VERSION = "taktline-plan", 1
TIMELINE_FORMAT = "taktline-timeline"
"""A file that holds a timeline holds its plan, with costs, in the same fields."""


def read(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file, CSV or JSON by its ending.

    >>> read("no-such-plan.csv")
    Traceback (most recent call last):
    taktline.errors.PlanFileError: no-such-plan.csv: cannot be read: No such file or directory
    """
    path = require_path("path", path)
    text = read_text(path)
    return from_json(text, path) if _is_json(path) else from_csv(text, path)


def read_costs(path: str | os.PathLike[str]) -> Costs | None:
    """The costs in a JSON plan file, if it has any; a CSV file has none.

    >>> read_costs("plan.csv") is None
    True
    """
    path = require_path("path", path)
    if not _is_json(path):
        return None
    return costs_from(json_object(read_text(path), path), path)


def write(plan: Plan, path: str | os.PathLike[str], *, costs: Costs | None = None) -> None:
    """Write a plan to a file, CSV or JSON by its ending: all of it or nothing.

    >>> from tempfile import TemporaryDirectory
    >>> from taktline.plan import build
    >>> plan = build("1f1b", ranks=2, microbatches=2)
    >>> with TemporaryDirectory() as folder:
    ...     write(plan, f"{folder}/plan.json", costs=Costs(forward=2.0))
    ...     read(f"{folder}/plan.json") == plan, read_costs(f"{folder}/plan.json").forward
    (True, 2.0)
    """
    path = require_path("path", path)
    if _is_json(path):
        write_text(path, to_json(plan, costs))
    elif costs is not None:
        raise PlanFileError(path, "a CSV file cannot hold costs; use .json")
    else:
        write_text(path, to_csv(plan))


def to_csv(plan: Plan) -> str:
    """A plan as CSV text.

    >>> from taktline.plan import build
    >>> to_csv(build("gpipe", ranks=2, microbatches=1))
    '0F0,0B0\\r\\n1F0,1B0\\r\\n'
    """
    require_instance("plan", plan, Plan)
    text = io.StringIO()
    csv.writer(text).writerows(plan[rank] for rank in range(plan.ranks))
    return text.getvalue()


def from_csv(text: str, path: str | os.PathLike[str] = "<text>") -> Plan:
    """A plan from CSV text; the path is for messages, and its stem names the plan."""
    require_text("text", text)
    path = require_path("path", path)
    reader = csv.reader(io.StringIO(text), strict=True)
    ranks: list[list[Action | Overlap]] = []
    try:
        for row in reader:
            if len(ranks) == MOST_RANKS:
                raise PlanFileError(path, f"a plan has at most {MOST_RANKS:,} ranks")
            ranks.append(list(_parse_cells(row, path, len(ranks) + 1)))
    except csv.Error as error:
        raise PlanFileError(path, f"not CSV: {error}", row=reader.line_num) from None
    while ranks and not ranks[-1]:
        ranks.pop()
    if not ranks:
        raise PlanFileError(path, "is empty: expected a row of actions for each rank")
    try:
        # A file's name may hold bytes that are not a text.
        name = os.fsencode(path.stem).decode("utf-8", "replace")
        return Plan.from_actions(ranks, name=name)
    except PlanError as error:
        raise PlanFileError(path, str(error)) from None


def to_json(plan: Plan, costs: Costs | None = None) -> str:
    """A plan as JSON text, one line a rank."""
    return layout(plan_fields(plan, costs))


def plan_fields(plan: Plan, costs: Costs | None) -> dict[str, Any]:
    """What JSON says of a plan."""
    require_instance("plan", plan, Plan)
    fields: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "origin": plan.name,
        "level": plan.level.name.lower(),
        "microbatches": plan.microbatches,
        "placement": list(plan.placement.rank_of),
    }
    if costs is not None:
        fields["costs"] = require_instance("costs", costs, Costs).to_dict()
    fields["ranks"] = [[str(action) for action in plan[rank]] for rank in range(plan.ranks)]
    return fields


def layout(fields: dict[str, Any]) -> str:
    """JSON text with a line for each field, and for each rank where a field has a list each."""
    lines = [f"  {json.dumps(name)}: {_value(value)}" for name, value in fields.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _value(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(part, list) for part in cast(list[Any], value)):
        return "[\n    " + ",\n    ".join(map(json.dumps, cast(list[Any], value))) + "\n  ]"
    return json.dumps(value)


def from_json(text: str, path: str | os.PathLike[str] = "<text>") -> Plan:
    """A plan from JSON text; the path is for messages."""
    path = require_path("path", path)
    return plan_from(json_object(text, path), path)


_PLAN = {"ranks": [[str]], "level": str, "placement": [int], "microbatches": int, "origin": str}


def plan_from(data: dict[str, Any], path: Path) -> Plan:
    """The plan that these fields describe."""
    fields = take(data, _PLAN, path)
    rows, level = fields["ranks"], fields["level"]
    if len(rows) > MOST_RANKS:
        raise PlanFileError(path, f"a plan has at most {MOST_RANKS:,} ranks, not {len(rows):,}")
    ranks = [list(_parse_cells(row, path, rank)) for rank, row in enumerate(rows, start=1)]
    levels = {level.name.lower(): level for level in Level}
    if level not in levels:
        raise PlanFileError(path, f"level is one of {', '.join(levels)}, not {shown(level)}")
    try:
        return Plan.from_actions(
            ranks,
            Placement.custom(fields["placement"], len(ranks)),
            fields["microbatches"],
            level=levels[level],
            name=fields["origin"],
        )
    except PlanError as error:
        raise PlanFileError(path, str(error)) from None


def costs_from(data: dict[str, Any], path: Path) -> Costs | None:
    """The costs that these fields describe, if they do."""
    if data.get("costs") is None:
        return None
    try:
        return Costs.from_dict(take(data, {"costs": {str: object}}, path)["costs"])
    except CostError as error:
        raise PlanFileError(path, f"costs: {error}") from None


def json_object(text: str, path: Path) -> dict[str, Any]:
    """The fields of a file, of a format and a version that are known here."""
    try:
        data = read_json(require_text("text", text), {str: object}, what=str(path))
    except JsonError as error:
        raise PlanFileError(path, error.reason, row=error.row, column=error.column) from None
    if data.get("format") not in (FORMAT, TIMELINE_FORMAT):
        raise PlanFileError(path, f'not a plan: expected "format": "{FORMAT}"')
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        raise PlanFileError(
            path,
            f"has version {shown(version)} of the format, but this program reads "
            f"version {VERSION}; use the Taktline that wrote it, or write it as CSV there",
        )
    return data


def take(data: dict[str, Any], shape: dict[str, Any], path: Path) -> dict[str, Any]:
    """Some of the fields of a file, if they have this shape."""
    try:
        return conform({name: data.get(name) for name in shape}, shape, what=str(path))
    except JsonError as error:
        raise PlanFileError(path, error.reason) from None


def _parse_cells(cells: Iterable[str], path: Path, row: int) -> Iterable[Action | Overlap]:
    for column, cell in enumerate(cells, start=1):
        if text := cell.strip():
            try:
                yield parse(text)
            except (ActionSyntaxError, PlanError) as error:
                raise PlanFileError(path, str(error), row=row, column=column) from None


def _is_json(path: Path) -> bool:
    ending = path.suffix.lower()
    if ending not in (".csv", ".json"):
        raise PlanFileError(path, f"a plan's file ends in .csv or .json, not {ending!r}")
    return ending == ".json"


def read_text(path: Path) -> str:
    """All of a file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PlanFileError(path, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PlanFileError(path, f"is not a text in UTF-8 (byte {error.start})") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text beside the target, then rename: a reader sees the old file or the new one."""
    path = require_path("path", path)
    require_text("text", text)
    target = Path(os.path.realpath(path))
    try:
        if target.exists():
            mode = stat.S_IMODE(target.stat().st_mode)
        else:
            os.umask(umask := os.umask(0))
            mode = 0o666 & ~umask
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(handle, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            os.chmod(temporary, mode)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise PlanFileError(path, f"cannot be written: {error.strerror}") from None
