"""Plans as CSV and JSON: read, validated, lowered, simulated and written again."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from random import Random

import taktline as tl
from taktline.plan import Plan, names, read
from taktline.plan.io import to_csv, to_json
from tests.fuzz.mutate import spoil_json, spoil_text

COSTS = tl.Costs(forward=2.0, link=tl.Link(latency=0.1, bandwidth=3.0), message_bytes=1.0)


_ROOM = "/dev/shm" if os.path.isdir("/dev/shm") else None


def draw(random: Random) -> tuple[str, str]:
    """A kind of file and its text."""
    plan = a_plan(random)
    if random.random() < 0.4:
        return "csv", spoil_text(random, to_csv(plan))
    text = to_json(plan, random.choice([None, COSTS]))
    if random.random() < 0.7:
        return "json", spoil_json(random, json.loads(text))
    return "json", spoil_text(random, text)


def try_(input: tuple[str, str]) -> None:
    """Read a plan, and use it as anybody would."""
    kind, text = input
    use(from_text(text, f"plan.{kind}"))


def from_text(text: str, name: str) -> Plan:
    """The plan in a file with this text."""
    with tempfile.TemporaryDirectory(dir=_ROOM) as folder:
        path = Path(folder, name)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return read(path)


def a_plan(random: Random) -> Plan:
    """A small plan of some schedule, lowered or not."""
    name = random.choice(names())
    plan = tl.build(name, ranks=random.randint(1, 3), microbatches=random.randint(1, 4))
    return tl.lower(plan) if random.random() < 0.3 else plan


def use(plan: Plan) -> None:
    """All that reads a plan."""
    repr(plan)
    if tl.validate(plan):
        return
    tl.simulate(plan, COSTS).bubble()
    again = from_text(to_json(tl.lower(plan)), "plan.json")
    if plan.microbatches < 100:
        str(again)
