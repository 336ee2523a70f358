"""Draws the order of a schedule to scale."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from taktline.compat.torch_pipelining import of_torch, schedules
from taktline.compat.torch_pipelining._metadata import like
from taktline.errors import ScheduleError
from taktline.plan import Costs, Plan, Timeline, simulate

Rows = Sequence[Sequence[Any]]
"""The actions of each rank; a None is a rank that waits."""


_torchs = of_torch("_schedule_visualizer")
OpKey = _torchs.OpKey
_ComputationTypeVisual = _torchs._ComputationTypeVisual
action_type_to_color_mapping = _torchs.action_type_to_color_mapping


@like(_torchs.get_schedule_ops)
def get_schedule_ops(schedule: str | type, *sizes: Any, **options: Any) -> Any:
    """The actions of each rank in a schedule, given by its name or class.

    >>> get_schedule_ops("GPipe", 2, 1)
    [[0F0, 0B0, 0REDUCE_GRAD...], [1F0, 1B0, 1REDUCE_GRAD...]]
    """
    cls: Any = schedules.get_schedule_class(schedule) if isinstance(schedule, str) else schedule
    given = signature(_torchs.get_schedule_ops).bind(cls, *sizes, **options).arguments
    lowers = given.get("with_comms") and not given.get("add_spacing")
    if not lowers or not issubclass(cls, schedules.PipelineScheduleSingle):
        return _torchs.get_schedule_ops(**given)
    # Torch's function cannot show messages for one stage per rank.
    rows = _torchs.get_schedule_ops(**given | {"with_comms": False})
    order = schedules._add_send_recv(dict(enumerate(rows)), lambda stage: stage, len(rows))
    return [order[rank] for rank in range(len(rows))]


def add_schedule_op_spacing(schedule: Rows) -> list[list[Any]]:
    """The actions with a None for each unit of time in which a rank waits.

    >>> read = schedules._Action.from_str
    >>> [f0, b0, f1] = map(read, ("0F0", "0B0", "1F0"))
    >>> add_schedule_op_spacing([[f0, b0], [f1, read("1B0")]])
    [[0F0, None, None, None, 0B0], [None, 1F0, 1B0, None]]
    """
    timeline = _played(schedule)
    begun = int(timeline.start.max())  # rows end when the last action begins
    spaced: list[list[Any]] = []
    for rank in range(len(schedule)):
        row: list[Any] = []
        now = 0
        actions = iter(_computations(schedule[rank]))
        for start, end in sorted({(int(s.start), int(s.end)) for s in timeline.spans(rank)}):
            row += [*[None] * (start - now), next(actions)]
            now = end
        spaced.append(row + [None] * (begun + 1 - now))
    return spaced


def _computations(actions: Sequence[Any]) -> list[Any]:
    return [action for action in actions if action is not None and action.is_compute_op]


def _played(schedule: Rows) -> Timeline:
    """The simulated timeline, if messages take no time."""
    plan = Plan.from_actions([[str(a) for a in _computations(rank)] for rank in schedule])
    units = {kind: float(drawn.width) for kind, drawn in action_type_to_color_mapping.items()}
    costs = Costs(
        forward=units[schedules.F],
        backward_input=units[schedules.I],
        backward_weight=units[schedules.W],
        backward=units[schedules.B],
        overlap=units[schedules.OVERLAP_F_B],
    )
    return simulate(plan, costs)


_torchs.add_schedule_op_spacing = add_schedule_op_spacing


def visualize_schedule(schedule: Rows, filename: str | None = None) -> None:
    """Draw the actions of each rank over time: into a file, or else as text.

    SVG and HTML need nothing else; any other kind of picture needs matplotlib.

    >>> visualize_schedule(get_schedule_ops("GPipe", 2, 1))
    custom: ...
    """
    timeline = _played(schedule)
    if filename is None:
        print(timeline.to_text())
    elif filename.endswith((".html", ".svg")):
        page = timeline.to_html() if filename.endswith(".html") else timeline.to_svg()
        Path(filename).write_text(page)
    else:
        try:
            _torchs.visualize_schedule([*map(list, schedule)], filename)
        except ImportError as error:
            raise ScheduleError(
                f"to draw {filename} matplotlib is needed: pip install taktline[plot]; or draw an "
                ".svg or .html file, which needs nothing"
            ) from error
