"""Draws the order of a schedule to scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from taktline.compat.torch_pipelining import of_torch
from taktline.compat.torch_pipelining.schedules import (
    OVERLAP_F_B,
    B,
    F,
    I,
    PipelineScheduleSingle,
    W,
    _Action,
    _add_send_recv,
    get_schedule_class,
)
from taktline.compat.torch_pipelining.stage import PipelineStage
from taktline.errors import InvalidOrderError, ScheduleError
from taktline.plan import Costs, Plan, Timeline, simulate

__all__ = [
    "OpKey",
    "_ComputationTypeVisual",
    "action_type_to_color_mapping",
    "add_schedule_op_spacing",
    "get_schedule_ops",
    "visualize_schedule",
]

Rows = Sequence[Sequence[_Action | None]]


_torchs = of_torch("_schedule_visualizer")
OpKey = _torchs.OpKey
_ComputationTypeVisual = _torchs._ComputationTypeVisual
action_type_to_color_mapping = _torchs.action_type_to_color_mapping


def get_schedule_ops(
    schedule: str | type,
    pp_degree: int,
    num_microbatches: int,
    num_stages_per_rank: int | None = None,
    add_spacing: bool = False,
    with_comms: bool = False,
    defer_pp_recv: bool = False,
) -> list[list[_Action | None]]:
    """What each rank does under a schedule, given by its name or class.

    >>> get_schedule_ops("GPipe", 2, 1)
    [[0F0, 0B0, 0REDUCE_GRAD], [1F0, 1B0, 1REDUCE_GRAD]]
    """
    if add_spacing and with_comms:
        raise ScheduleError("Cannot add spacing and view comms at the same time")
    cls: Any = get_schedule_class(schedule) if isinstance(schedule, str) else schedule
    single = issubclass(cls, PipelineScheduleSingle)
    per_rank = (1 if single else 2) if num_stages_per_rank is None else num_stages_per_rank
    if single and per_rank != 1:
        raise InvalidOrderError(f"Expected num_stages_per_rank to be 1, got {per_rank}")
    order: Any
    stages = [_stand_in(place, pp_degree, per_rank) for place in range(per_rank)]
    if single:
        order = cls(stages[0], num_microbatches)._get_pipeline_order()
        if with_comms:
            order = _add_send_recv(order, lambda stage: stage, pp_degree)
    else:
        made = cls(stages, num_microbatches, **({"defer_pp_recv": True} if defer_pp_recv else {}))
        order = made.pipeline_order_with_comms if with_comms else made.pipeline_order
    rows = [list(order[rank]) for rank in range(pp_degree)]
    return add_schedule_op_spacing(rows) if add_spacing else rows


def _stand_in(place: int, ranks: int, per_rank: int) -> Any:
    """A stage of rank 0 that only has its numbers."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size = 0, ranks
    stage.num_stages, stage.stage_index = ranks * per_rank, place * ranks
    stage.submod, stage.group, stage.has_backward = None, None, True
    return stage


def add_schedule_op_spacing(schedule: Rows) -> list[list[_Action | None]]:
    """The same with a None for each unit of time in which a rank waits.

    >>> [f0, b0, f1] = map(_Action.from_str, ("0F0", "0B0", "1F0"))
    >>> add_schedule_op_spacing([[f0, b0], [f1, _Action.from_str("1B0")]])
    [[0F0, None, None, None, 0B0], [None, 1F0, 1B0, None]]
    """
    timeline = _played(schedule)
    begun = int(timeline.start.max())  # nothing is told of the time behind the last beginning
    spaced: list[list[_Action | None]] = []
    for rank in range(len(schedule)):
        row: list[_Action | None] = []
        now = 0
        actions = iter(_computations(schedule[rank]))
        for start, end in sorted({(int(s.start), int(s.end)) for s in timeline.spans(rank)}):
            row += [*[None] * (start - now), next(actions)]
            now = end
        spaced.append(row + [None] * (begun + 1 - now))
    return spaced


def _computations(actions: Sequence[_Action | None]) -> list[_Action]:
    return [action for action in actions if action is not None and action.is_compute_op]


def _played(schedule: Rows) -> Timeline:
    """When everything happens, if messages take no time."""
    plan = Plan.from_actions([[str(a) for a in _computations(rank)] for rank in schedule])
    units = {kind: float(drawn.width) for kind, drawn in action_type_to_color_mapping.items()}
    costs = Costs(
        forward=units[F],
        backward_input=units[I],
        backward_weight=units[W],
        backward=units[B],
        overlap=units[OVERLAP_F_B],
    )
    return simulate(plan, costs)


def visualize_schedule(schedule: Rows, filename: str | None = None) -> None:
    """Draw what each rank does when: into a file, or as text if there is none.

    SVG and HTML need nothing else; any other kind of picture needs matplotlib.

    >>> visualize_schedule(get_schedule_ops("GPipe", 2, 1))
    custom: ...
    """
    timeline = _played(schedule)
    if filename is None:
        print(timeline.to_text())
    elif filename.endswith(".html"):
        Path(filename).write_text(timeline.to_html())
    elif filename.endswith(".svg"):
        Path(filename).write_text(timeline.to_svg())
    else:
        try:
            _torchs.visualize_schedule([*map(list, schedule)], filename)
        except ImportError as error:
            raise ScheduleError(
                f"to draw {filename} matplotlib is needed: pip install taktline[plot]; or draw an "
                ".svg or .html file, which needs nothing"
            ) from error
