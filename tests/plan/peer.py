"""torch.distributed.pipelining as an oracle: its schedules on stand-in stages, no processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from unittest import mock

from torch.distributed.pipelining import schedules as torch_schedules


class StandIn:
    """What a torch schedule asks of a stage to write its order down or to run; notes the calls."""

    def __init__(self, index: int, stages: int, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = rank, ranks
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward = True
        self.submod = self.group = None
        self.dw_builder = None
        self.calls: list[str] = []

    def forward_one_chunk(self, number: int, *args: Any, **kwargs: Any) -> None:
        self.calls.append(f"{self.stage_index}F{number}")

    def backward_one_chunk(self, number: int, *args: Any, **kwargs: Any) -> None:
        self.calls.append(f"{self.stage_index}B{number}")

    def _nothing(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing
    perform_reduce_grad = release_fwd_send_outputs = _nothing


def make(name: str, rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Any:
    """One of torch's schedules, on stages that do nothing."""
    factory: Any = torch_schedules.get_schedule_class(name)
    if name in ("GPipe", "1F1B"):
        return factory(StandIn(rank, ranks, rank, ranks), microbatches)
    stages = [StandIn(rank, ranks * stages_per_rank, rank, ranks) for _ in range(stages_per_rank)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return factory(stages, microbatches)


def compute_order(
    name: str, ranks: int, microbatches: int, stages_per_rank: int
) -> list[list[str]] | None:
    """The order that torch writes down, rank by rank; None where it refuses the numbers."""
    # Without the communication that it then adds for itself, which takes as long again.
    runtime = torch_schedules._PipelineScheduleRuntime
    try:
        with mock.patch.object(runtime, "_prepare_schedule_with_comms"):
            schedule = make(name, 0, ranks, microbatches, stages_per_rank)
    except ValueError:
        return None
    order = schedule.pipeline_order
    return [[str(action) for action in order[rank] if action is not None] for rank in range(ranks)]


DEFERS = hasattr(torch_schedules, "_defer_recv_ops")
"""Whether the installed torch can defer receives."""


def lowered_order(
    name: str, ranks: int, microbatches: int, stages_per_rank: int, *, defer: bool = False
) -> list[list[str]]:
    """The order with communication that torch would run, rank by rank."""
    schedule = make(name, 0, ranks, microbatches, stages_per_rank)
    order = schedule.pipeline_order_with_comms
    if defer:
        order = torch_schedules._defer_recv_ops(
            order, lambda stage: schedule.stage_index_to_group_rank[stage]
        )
    return [without_waits(order[rank]) for rank in range(ranks)]


def without_waits(actions: Iterable[Any]) -> list[str]:
    """Actions as texts; some versions of torch also write down where they wait."""
    return [str(action) for action in actions if "WAIT_" not in str(action)]


def recorded_order(name: str, ranks: int, microbatches: int) -> list[list[str]] | None:
    """What torch's single-stage schedules really run; None where they refuse the numbers."""
    calls = []
    for rank in range(ranks):
        try:
            schedule = make(name, rank, ranks, microbatches, 1)
        except ValueError:
            return None
        schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
        schedule._initialize_stage = schedule._maybe_compute_loss = lambda *args, **kwargs: None
        schedule._maybe_get_loss = schedule._update_losses = lambda *args, **kwargs: None
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
        calls.append(schedule._stage.calls)
    return calls
