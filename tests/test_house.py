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

PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


LATER = {"torch.distributed._mesh_layout._FlatLayout"}
"""Names that torch 2.11 lacks."""


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
@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.slow)])
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
    if name not in LATER:
        assert pkgutil.resolve_name(name) is not None
