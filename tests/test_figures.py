"""docs/benchmarks.md and its plots are drawn from stored results, which `make bench` refreshes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.documents import ROOT


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "_figures", raising=False)
    import _figures  # pyright: ignore[reportMissingImports]

    return _figures


def test_page_and_plots_are_those_of_the_results(figures: Any) -> None:
    """`python benchmarks/_figures.py` writes them."""
    for path, text in figures.files().items():
        assert path.read_text() == text, path.name
        if path.suffix == ".svg":
            ElementTree.fromstring(text)


def test_a_benchmark_replaces_its_row(
    figures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures.STORE = tmp_path / "figures.json"
    one = {
        "title": "A",
        "what": "B",
        "command": "c",
        "rows": {"x": {"torch": 1.0}, "y": {"torch": 2.0}},
    }
    figures.STORE.write_text(json.dumps({"one": one}))
    figures.record("one", "x", {"torch": 3.0})
    assert json.loads(figures.STORE.read_text()) == {"one": one}  # only when it is asked for
    monkeypatch.setenv("BENCH_RECORD", "1")
    figures.record("one", "x", {"torch": 300.0, "taktline": 4.0})
    (found,) = json.loads(figures.STORE.read_text()).values()
    assert found["rows"] == {"x": {"torch": 300.0, "taktline": 4.0}, "y": {"torch": 2.0}}
    assert "cores" in found["machine"]
    assert "torch" in found["versions"]
    assert found["date"]
    svg, page = figures.to_svg(found), figures.to_page({"one": found})
    assert ">300<" in svg
    assert ">4<" in svg
    assert "images/bench-one.svg" in page
    assert "logarithmic" in page
