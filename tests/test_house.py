"""What docs/architecture.md says of the package is so."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys

import pytest

from tests.documents import ROOT
from tests.private_names import imported_directly, used
from tests.rooms import PICTURE, drawing, imports, levels
from tests.walks import walks

PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def section(title: str) -> str:
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", PAGE, re.S | re.M)
    assert found is not None
    return found[1]


def test_the_drawn_rooms_are_current() -> None:
    assert PICTURE.read_text("utf-8") == drawing(), "refresh with: python -m tests.rooms"


def test_a_circle_is_found() -> None:
    assert levels({"a": {"b"}, "b": set()}) == {"b": 0, "a": 1}
    with pytest.raises(ValueError, match=r"a circle among \['a', 'b'\]"):
        levels({"a": {"b"}, "b": {"a"}, "c": set()})


BUDGETS = {
    "plan": 4_932,
    "stage": 1_783,
    "transport": 3_572,
    "runtime": 5_787,
    "train": 3_158,
    "checkpoint": 1_918,
    "render": 849,
    "cli": 1_600,
    "compat": 2_309,
    "split": 4_024,
    "": 1_784,
}
"""The most lines of each room, and of the files beside them; they may only become fewer."""


@pytest.mark.parametrize("room", BUDGETS)
def test_rooms_keep_to_their_budgets(room: str) -> None:
    folder = ROOT / "taktline" / room
    files = folder.rglob("*.py") if room else folder.glob("*.py")
    assert sum(len(file.read_text("utf-8").splitlines()) for file in files) <= BUDGETS[room]


def test_every_room_has_a_budget() -> None:
    rooms = {path.parent.name for path in (ROOT / "taktline").glob("*/__init__.py")}
    assert rooms == BUDGETS.keys() - {""}


WALKS = {"cut": 10, "batch": 15, "save": 12, "error": 14}


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
    rooms = set(re.findall(r"^\| (`.*?) \|", PAGE.split("\n## ")[0], re.M))
    named = {name for cell in rooms for name in re.findall(r"`(\w+)`", cell)}
    assert named == imports().keys() - {"__main__"}


def test_the_rule_of_imports_names_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rule = re.search(r"^    text ←.*?\n\n", text, re.S | re.M)
    assert rule is not None
    assert set(re.findall(r"\w+", rule[0])) == imports().keys() - {"__main__"}


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
    assert used().keys() - listed() == set(), "add them to docs/architecture.md, with a reason"
    assert listed() - used().keys() == set(), "nobody uses them any more: remove their names"


def test_private_names_of_torch_are_looked_up() -> None:
    """Not imported: a version of torch may lack them."""
    rooms = ("compat/",)
    files = {file for files in imported_directly().values() for file in files}
    assert not {file for file in files if not file.startswith(rooms)}


@pytest.mark.limit(900)
@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_the_package_is_imported_without_private_names_of_torch(each: bool) -> None:
    words = [sys.executable, "-W", "error", "-m", "tests.missing_names", *(["--each"] * each)]
    made = subprocess.run(words, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\d\d names\n", made.stdout), made.stdout


def test_trees_come_from_one_module() -> None:
    rooms = [rooms for name, rooms in used().items() if name.startswith("torch.utils._pytree")]
    assert set().union(*rooms) == {"pytree"}, "import taktline.pytree instead"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules of torch that it loads
@pytest.mark.parametrize("name", sorted(name for name in listed() if name.startswith("torch.")))
def test_private_names_are_still_there(name: str) -> None:
    assert pkgutil.resolve_name(name) is not None
