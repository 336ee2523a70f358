"""Schedules drawn, from their names."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from taktline.compat.torch_pipelining._schedule_visualizer import (
    get_schedule_ops,
    visualize_schedule,
)
from taktline.compat.torch_pipelining.schedules import _Action
from tests.compat.peer import module

_visualizer = module("._schedule_visualizer")


def test_drawings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = get_schedule_ops("GPipe", 2, 2)
    visualize_schedule(rows, str(tmp_path / "a.svg"))
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    visualize_schedule(rows, str(tmp_path / "a.html"))
    assert "<html" in (tmp_path / "a.html").read_text()
    visualize_schedule(rows)
    assert "rank 1" in capsys.readouterr().out


def test_other_pictures_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[_Action.from_str(text) for text in ("0F0", "0B0")]]
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"pip install taktline\[plot\]; or draw an \.svg"):
        visualize_schedule(rows, "a.png")
    pyplot, axes = MagicMock(rcParams={}), MagicMock()
    pyplot.subplots.return_value = MagicMock(), axes
    for name in ("matplotlib", "matplotlib.pyplot", "matplotlib.patches"):
        monkeypatch.setitem(sys.modules, name, pyplot if name.endswith("pyplot") else MagicMock())
    monkeypatch.setattr(sys.modules["matplotlib"], "pyplot", pyplot)
    visualize_schedule(rows, "a.png")
    assert axes.add_patch.call_count == 2
    assert pyplot.savefig.call_args.args == ("a.png",)
