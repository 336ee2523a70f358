"""The notebook runs from its first cell to its last, and each shows something."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT


def show(code: str, names: dict[str, Any]) -> Any:
    """Run a cell; returns what a notebook shows of its last line."""
    *first, last = ast.parse(code).body
    exec(compile(ast.Module(first, []), "cell", "exec"), names)
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_every_cell_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    shown = [show("".join(c["source"]), names) for c in cells if c["cell_type"] == "code"]
    pipe, metrics, verified, plan, timeline, page = shown
    assert "<svg" in pipe._repr_html_()
    assert metrics["loss"] < 1
    assert verified, str(verified)
    assert "<svg" in plan._repr_svg_()
    assert "<svg" in timeline._repr_svg_()
    assert page.read_text().startswith("<!doctype html>")
    assert "step   30  loss" in capsys.readouterr().out
