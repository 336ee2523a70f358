"""Schedules drawn, from their names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from taktline.compat.torch_pipelining._schedule_visualizer import (
    get_schedule_ops,
    visualize_schedule,
)


def test_drawings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = get_schedule_ops("GPipe", 2, 2)
    for name, beginning in {"a.svg": "<svg", "a.html": "<!doctype html>"}.items():
        visualize_schedule(rows, str(tmp_path / name))
        assert (tmp_path / name).read_text().lower().startswith(beginning)
    visualize_schedule(rows)
    assert "rank 1" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ImportError, match="matplotlib"):
        visualize_schedule(rows, "a.png")  # torch's own
