"""The notebook runs from its first cell to its last, and has stored what each of them shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.notebook import NOTEBOOK, executed


def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fresh, (pipe, metrics, verified, plan, timeline, page) = executed()
    assert "<svg" in pipe._repr_html_()
    assert metrics["loss"] < 1
    assert verified, str(verified)
    assert "<svg" in plan._repr_svg_()
    assert "<svg" in timeline._repr_svg_()
    assert page.read_text().startswith("<!doctype html>")
    stored = json.loads(NOTEBOOK.read_text())
    for old, new in zip(code(stored), code(fresh), strict=True):
        assert [kinds(each) for each in old["outputs"]] == [kinds(each) for each in new["outputs"]]
        if "progress(" not in "".join(new["source"]):  # its times differ
            assert old["outputs"] == new["outputs"], "refresh with: python -m tests.notebook"
    assert "step   30  loss" in "".join(code(fresh)[1]["outputs"][0]["text"])


def code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(output: dict[str, Any]) -> list[str]:
    return [output["output_type"], *output.get("data", ())]
