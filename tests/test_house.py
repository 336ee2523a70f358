"""What docs/architecture.md says of the package is so."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys

import pytest

from tests.documents import ROOT
from tests.private_names import attributes, names, written
from tests.walks import walks

PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def section(title: str) -> str:
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", PAGE, re.S | re.M)
    assert found is not None
    return found[1]


def rooms() -> set[str]:
    """The folders and modules directly in the package."""
    found = {path.stem for path in (ROOT / "taktline").iterdir() if path.suffix in ("", ".py")}
    return {name for name in found if not name.startswith("__")}


BUDGETS = {
    "plan": 6_723,
    "stage": 2_602,
    "transport": 3_853,
    "runtime": 6_063,
    "train": 5_604,
    "checkpoint": 1_850,
    "render": 913,
    "cli": 1_782,
    "compat": 2_301,
    "split": 4_118,
    "": 1_725,
}
"""The most lines of each room, and of the files beside them; they may only become fewer."""


@pytest.mark.parametrize("room", BUDGETS)
def test_rooms_keep_to_their_budgets(room: str) -> None:
    folder = ROOT / "taktline" / room
    files = folder.rglob("*.py") if room else folder.glob("*.py")
    assert sum(len(file.read_text("utf-8").splitlines()) for file in files) <= BUDGETS[room]


def test_every_room_has_a_budget() -> None:
    assert {path.parent.name for path in (ROOT / "taktline").glob("*/__init__.py")} == {
        room for room in BUDGETS if room
    }


WALKS = {"cut": 10, "batch": 15, "save": 10, "error": 14}


def test_walks_are_no_longer_than_before() -> None:
    """The most files that code passes, in one process; they may only become fewer."""
    found = {name: len(files) for name, files in walks().items()}
    assert {name for name in WALKS if found[name] > WALKS[name]} == set(), found
    said = re.search(r"(\d+) files for a\nbatch, (\d+) for a cut, (\d+) for a save, (\d+)", PAGE)
    assert said is not None
    assert [int(number) for number in said.groups()] == [
        WALKS[name] for name in ("batch", "cut", "save", "error")
    ]


def test_every_room_is_named() -> None:
    cells = re.findall(r"^\| (`.*?) \|", PAGE.split("\n## ")[0], re.M)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == rooms()


def test_the_rule_of_imports_names_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rule = re.search(r"^    text ←.*?\n\n", text, re.S | re.M)
    assert rule is not None
    assert set(re.findall(r"\w+", rule[0])) == rooms()


@pytest.mark.parametrize("what", ["model", "plan", "batch", "message"])
def test_ways_are_short_and_lead_through_files_that_exist(what: str) -> None:
    steps = re.findall(r"^\d\. `(\S+?\.py)`", section(f"The way of a {what}"), re.M)
    assert 5 <= len(steps) <= 8
    for name in re.findall(r"`(\S+?\.py)`", section(f"The way of a {what}")):
        assert (ROOT / "taktline" / name).is_file(), f"there is no taktline/{name}"


def listed() -> set[str]:
    rows = re.findall(r"^\| (`.*) \|", section("What is private in torch"), re.M)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row.split(" | ")[0])}


def test_private_names_of_torch_are_listed_with_a_reason() -> None:
    used = names() | attributes()
    # A module stands for what is in it.
    covered = {one for one in used for n in listed() if one == n or one.startswith(f"{n}.")}
    assert used - covered == set(), "add them to docs/architecture.md, with a reason"
    needed = {n for n in listed() for one in used if one == n or one.startswith(f"{n}.")}
    assert listed() - needed == set(), "nobody uses them any more: remove their names"


def test_private_names_of_torch_are_looked_up() -> None:
    """Not imported: a version of torch may lack them."""
    assert written() == set()


@pytest.mark.matrix
@pytest.mark.limit(900)
def test_the_package_is_imported_without_private_names_of_torch() -> None:
    words = [sys.executable, "-W", "error", "-m", "tests.missing_names"]
    made = subprocess.run(words, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\d\d names\n", made.stdout), made.stdout


def test_trees_come_from_one_module() -> None:
    files = (ROOT / "taktline").rglob("*.py")
    lines = {f.name for f in files if "from torch.utils._pytree" in f.read_text("utf-8")}
    assert lines == {"pytree.py"}, "import taktline.pytree instead"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules of torch that it loads
@pytest.mark.parametrize("name", sorted(name for name in listed() if name.startswith("torch.")))
def test_private_names_are_still_there(name: str) -> None:
    assert pkgutil.resolve_name(name) is not None
