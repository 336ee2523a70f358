"""Draws the order of a schedule to scale. All other names are from torch's module of this name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from taktline.compat.torch_pipelining import of_torch
from taktline.plan import Plan, simulate

_torchs = of_torch("_schedule_visualizer")

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

else:
    globals().update({k: v for k, v in vars(_torchs).items() if k not in globals()})


def visualize_schedule(schedule: Sequence[Sequence[Any]], filename: str | None = None) -> None:
    """Draw the actions of each rank over time: into a file, or else as text.

    SVG and HTML need nothing else; any other kind of picture needs matplotlib.

    >>> visualize_schedule(get_schedule_ops("GPipe", 2, 1))
    custom: ...
    """
    rows = [[str(a) for a in row if a is not None and a.is_compute_op] for row in schedule]
    timeline = simulate(Plan.from_actions(rows))  # by usual costs, which are torch's widths
    if filename is None:
        print(timeline.to_text())
    elif filename.endswith((".svg", ".html")):
        timeline.save(filename)
    else:
        _torchs.visualize_schedule([*map(list, schedule)], filename)
