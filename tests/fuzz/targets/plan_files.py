"""Files of plans and timelines by their bytes, and what is no such file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from random import Random

import taktline as tl
from taktline.plan import read, read_costs, read_timeline, write_timeline
from taktline.plan.io import is_timeline, to_csv, to_json
from tests.fuzz.mutate import spoil_bytes, spoil_text
from tests.fuzz.targets.plan_texts import COSTS, a_plan, use

ENDINGS = [".csv", ".json", ".CSV", ".txt", ""]
PATHS = [
    "",
    ".",
    "/",
    "no-such.csv",
    "\0.csv",
    "\ud800.json",
    "a" * 5000 + ".csv",
    None,
    3,
    b"a.csv",
]


def draw(random: Random) -> tuple[object, bytes]:
    """An ending, or a path as it is, and bytes to write there."""
    if random.random() < 0.03:
        return random.choice(PATHS), b""
    plan = a_plan(random)
    match random.randrange(3):
        case 0:
            ending, data = ".csv", to_csv(plan).encode()
        case 1:
            ending, data = ".json", to_json(plan, COSTS).encode()
        case _:
            ending, data = ".json", _timeline(plan)
    if random.random() < 0.05:
        ending = random.choice(ENDINGS)
    if random.random() < 0.5:
        return ending, spoil_bytes(random, data)
    text = spoil_text(random, data.decode()).encode("utf-8", "surrogatepass")
    return ending, random.choice([b"", b"", b"", b"\xef\xbb\xbf", b"\xff\xfe"]) + text


def try_(input: tuple[object, bytes]) -> None:
    """Read the file in every way."""
    place, data = input
    if place not in ENDINGS or not data:
        for function in (read, read_costs, read_timeline, is_timeline):
            try:
                function(place)  # type: ignore[arg-type]
            except tl.TaktlineError:
                continue
        return
    with tempfile.TemporaryDirectory(dir=_ROOM) as folder:
        path = Path(folder, f"file{place}")
        path.write_bytes(data)
        if is_timeline(path):
            timeline = read_timeline(path)
            timeline.bubble()
            timeline.critical_path()
            tl.Costs.from_timeline(timeline)
        else:
            read_costs(path)
            use(read(path))


_ROOM = "/dev/shm" if os.path.isdir("/dev/shm") else None


def _timeline(plan: tl.Plan) -> bytes:
    with tempfile.TemporaryDirectory(dir=_ROOM) as folder:
        path = Path(folder, "timeline.json")
        write_timeline(tl.simulate(plan, COSTS), path)
        return path.read_bytes()
