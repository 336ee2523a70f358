"""Schedules drawn, from their names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from taktline.compat.torch_pipelining._schedule_visualizer import (
    OpKey,
    add_schedule_op_spacing,
    get_schedule_ops,
    visualize_schedule,
)
from taktline.compat.torch_pipelining.schedules import F, ScheduleGPipe, _Action
from tests.compat.peer import module, outcome, require_same

_visualizer = module("._schedule_visualizer")


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
@pytest.mark.parametrize("spacing", [False, True])
def test_orders_and_the_time_they_take(name: str, spacing: bool) -> None:
    peer, ours = (
        outcome(get, name, 2, 4, 2, add_spacing=spacing) for get in _visualizer.get_schedule_ops
    )
    require_same(peer, ours)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (("GPipe", 4, 8), {}),
        (("ZBVZeroBubble", 2, 4), {}),
        (("GPipe", 2, 4, 2), {}),
        (("ZBVZeroBubble", 2, 4, 3), {}),
        (("nonsense", 2, 4), {}),
        (("LoopedBFS", 2, 4), {"add_spacing": True, "with_comms": True}),
    ],
)
def test_orders_of_torch(args: tuple[object, ...], options: dict[str, bool]) -> None:
    peer, ours = (outcome(get, *args, **options) for get in _visualizer.get_schedule_ops)
    require_same(peer, ours)


def test_what_torch_cannot_show() -> None:
    # Its 1F1B begins with the second micro-batch on the last rank.
    assert str(get_schedule_ops("1F1B", 2, 2, add_spacing=True)) == (
        "[[0F0, 0F1, None, None, 0B0, None, 0B1], [None, 1F0, 1B0, 1F1, 1B1, None]]"
    )
    shown = str(get_schedule_ops(ScheduleGPipe, 2, 1, with_comms=True))
    assert re.sub(r", \dWAIT_REDUCE_GRAD", "", shown) == (  # since torch 2.15
        "[[0F0, 0SEND_F0, 0RECV_B0, 0B0, 0REDUCE_GRAD], "
        "[1RECV_F0, 1F0, 1B0, 1SEND_B0, 1REDUCE_GRAD]]"
    )
    # A rank that ends before the first has nothing put in another's row.
    rows = get_schedule_ops("ZBVZeroBubble", 2, 4, add_spacing=True)
    assert {a.stage_index for a in rows[0] if a} == {0, 3}
    pair = get_schedule_ops("DualPipeV", 2, 4)
    assert [a for a in add_schedule_op_spacing(pair)[0] if a] == pair[0]


def test_drawings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = get_schedule_ops("GPipe", 2, 2)
    visualize_schedule(rows, str(tmp_path / "a.svg"))
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    visualize_schedule(rows, str(tmp_path / "a.html"))
    assert "<html" in (tmp_path / "a.html").read_text()
    visualize_schedule(rows)
    assert "rank 1" in capsys.readouterr().out
    assert OpKey(0, F, 1)._fields == _visualizer.peer.OpKey._fields


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
