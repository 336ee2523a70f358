"""The parts of ``make versions`` that need no environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import versions
from tests.versions import PAGE, install, main, with_table


def test_the_table_goes_between_its_marks() -> None:
    page = PAGE.read_text()
    once = with_table(page, {("3.9", "9.9"): "passes"}, day="2030-01-01")
    assert "\n| torch | Python 3.9 |\n|---|---|\n| 9.9 | passes |\n" in once
    assert once.split("<!--")[0] == page.split("<!--")[0]
    assert once.split("-->")[-1] == page.split("-->")[-1]
    twice = with_table(once, {("3.9", "9.9"): "fails: unit"}, day="2030-01-02")
    assert "passes |" not in twice
    assert "2030-01-01" not in twice


def test_all_results_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "support.md"
    page.write_text(PAGE.read_text())
    monkeypatch.setattr(versions, "PAGE", page)
    monkeypatch.setattr(versions, "_FOLDER", tmp_path)
    tried: list[str] = []

    def tested(folder: Path) -> str:
        tried.append(folder.name)
        return "fails: unit" if folder.name == "3.12-2.13" else "passes"

    monkeypatch.setattr(versions, "install", lambda pair, folder: "no wheel" * (pair[0] == "3.14"))
    monkeypatch.setattr(versions, "run_tests", tested)
    assert main(["--python", "3.11", "3.14", "--torch", "2.13"]) == 0
    assert main(["--python", "3.12", "--torch", "2.13"]) == 1
    assert tried == ["3.11-2.13", "3.12-2.13"]
    assert "| 2.13 | passes | fails: unit | no wheel |" in page.read_text()


def test_a_python_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert install(("3.11", "2.13"), tmp_path / "new") == "no python3.11 here"
    assert not (tmp_path / "new").exists()
