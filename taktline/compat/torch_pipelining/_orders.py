"""Orders of schedules: how 1F1B goes on one rank, and how an order is shown elsewhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from taktline.compat.torch_pipelining import _runtime
from taktline.compat.torch_pipelining._action import B, F, I, W, _Action, _ComputationType
from taktline.errors import ScheduleError

__all__ = [
    "_dump_chrometrace",
    "_get_1f1b_rank_ops",
    "_get_profiler_function_name",
    "_get_warmup_ops",
    "get_schedule_class",
]

_CLASSES = {
    "1F1B": "Schedule1F1B",
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "GPipe": "ScheduleGPipe",
    "LoopedBFS": "ScheduleLoopedBFS",
    "InterleavedZeroBubble": "ScheduleInterleavedZeroBubble",
    "PipelineScheduleSingle": "PipelineScheduleSingle",
    "PipelineScheduleMulti": "PipelineScheduleMulti",
    "ZBVZeroBubble": "ScheduleZBVZeroBubble",
    "DualPipeV": "ScheduleDualPipeV",
}


def get_schedule_class(schedule_name: str) -> Any:
    """The class of that name, in any letter case.

    >>> get_schedule_class("gpipe").__name__
    'ScheduleGPipe'
    """
    for name, attribute in _CLASSES.items():
        if name.lower() == schedule_name.lower():
            return getattr(_runtime, attribute)
    raise ScheduleError(
        f"Unknown schedule name '{schedule_name}'. The valid options are {list(_CLASSES)}"
    )


def _get_profiler_function_name(action: _Action) -> str:
    """What a profiler shows.

    >>> _get_profiler_function_name(_Action(0, F, 1))
    'PP:0F1'
    """
    return f"PP:{action}"


def _dump_chrometrace(schedule: Mapping[int, Sequence[_Action | None]], filename: str) -> None:
    """Write an order as a trace with a unit of time for each step."""
    events = [
        {
            "name": str(action),
            "cat": "computation" if action.computation_type in (F, B, W) else "communication",
            "ph": "X",
            "pid": rank,
            "tid": rank,
            "ts": step,
            "dur": 1,
        }
        for rank in sorted(schedule)
        for step, action in enumerate(schedule[rank])
        if action is not None
    ]
    with open(filename, "w") as file:
        json.dump({"traceEvents": events}, file)


def _get_warmup_ops(
    rank: int,
    n_local_stages: int,
    microbatches_per_round: int,
    pp_group_size: int,
    n_microbatches: int,
    multiply_factor: int = 2,
) -> int:
    """How many forwards a rank runs before its first backward.

    >>> _get_warmup_ops(0, 2, 4, 4, 8)
    10
    """
    rounds = (n_local_stages - 1) * microbatches_per_round
    return min(
        rounds + multiply_factor * (pp_group_size - 1 - rank), n_microbatches * n_local_stages
    )


def _get_1f1b_rank_ops(
    n_local_stages: int,
    pp_group_size: int,
    warmup_ops: int,
    fwd_bwd_ops: int,
    cooldown_ops: int,
    rank: int,
    forward_stage_index: Callable[[int], int],
    backward_stage_index: Callable[[int], int],
    num_1f1b_microbatches: int = 0,
    enable_zero_bubble: bool = False,
) -> list[_Action | None]:
    """One rank's order of interleaved 1F1B, with a None for each step in which it waits.

    ::

        rank 0 of 2 │ 0F0 0F1 │ ·   ·   │ 0F2 0B0 0F3 0B1 │ ·   0B2 ·   0B3
                      warm-up   waiting   steady            cool-down

    With ``enable_zero_bubble`` each backward is an I, and from the given number of backwards on a
    W follows each; the other Ws come last.

    >>> _get_1f1b_rank_ops(1, 2, 1, 1, 1, 0, lambda op: 0, lambda op: 0)
    [0F0, None, None, None, 0F1, 0B0, None, 0B1]
    """
    counts: Counter[tuple[_ComputationType, int]] = Counter()

    def action(kind: _ComputationType, stage: int) -> _Action:
        counts[kind, stage] += 1
        return _Action(stage, kind, counts[kind, stage] - 1)

    behind = pp_group_size - 1 - rank
    # Until the first micro-batch has come back from the last stage.
    wait = n_local_stages * pp_group_size + 2 * behind - (warmup_ops + rank)
    order: list[_Action | None] = [None] * rank
    order += [action(F, forward_stage_index(op)) for op in range(warmup_ops)]
    if warmup_ops:
        order += [None] * (behind if enable_zero_bubble else wait)
    steady, end = warmup_ops + fwd_bwd_ops, warmup_ops + fwd_bwd_ops + cooldown_ops
    put_off: list[int] = []
    for op in range(warmup_ops, end):
        if op < steady:
            order.append(action(F, forward_stage_index(op)))
        elif not enable_zero_bubble:
            order.append(None)
        stage = backward_stage_index(op)
        order.append(action(I if enable_zero_bubble else B, stage))
        put_off.append(stage)
        if enable_zero_bubble and op - warmup_ops >= num_1f1b_microbatches:
            order.append(action(W, put_off.pop(0)))
    if enable_zero_bubble:
        order += [action(W, stage) for stage in put_off]
    return order
