"""Orders in which a rank has nothing to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from taktline.compat.torch_pipelining import schedules
from taktline.errors import ScheduleError
from tests.compat.programs import Program, loss_fn, wrapped
from tests.compat.test_custom_schedules import order
from tests.plan.peer import StandIn
from tests.workers import Workers

ROWS = ("0F0 0F1 2F0 2F1 . 2B0 2B1 0B0 0B1", ". 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")
PLACED = ((0, 2), (1, 3))


def _of_computations(stages: Any) -> Any:
    schedule = schedules.PipelineScheduleMulti(stages, 2, loss_fn=loss_fn)
    schedule.pipeline_order = order(*ROWS, ". . .")
    schedule._validate_and_set_stage_mapping(schedule.pipeline_order)
    return schedule


def _without_a_row(stages: Any) -> Any:
    schedule = schedules.PipelineScheduleMulti(stages, 2, loss_fn=loss_fn)
    schedule.pipeline_order = order(*ROWS)
    return schedule


def _of_messages(stages: Any) -> Any:
    schedule = schedules._PipelineScheduleRuntime(stages, 2, loss_fn=loss_fn)
    schedule._prepare_schedule_with_comms(order(*ROWS, "."))
    assert schedule.pipeline_order_with_comms[2] == []
    return schedule


def _runs(rank: int, group: dist.ProcessGroup) -> list[str]:
    said: list[str] = []
    for make in (_of_computations, _without_a_row, _of_messages):
        # A stage says where the third rank computes, though it runs none.
        program = Program(group, 4, [*PLACED[rank]] if rank < 2 else [3])
        if rank == 2:
            program.modules, program.first, program.last = {}, False, False
        schedule = make(program.stages)
        for _ in range(2):
            program.train(schedule)
            program.step(schedule, "eval")
        assert schedule._on_ours
        for stage in program.stages:
            wrapped(stage)
        again = make(program.stages)
        with pytest.raises(ScheduleError, match="rank 2 has nothing to do in this order") as caught:
            program.step(again)
        said.append(str(caught.value))
    return said


@pytest.mark.processes
def test_a_pipeline_with_an_idle_rank(workers: Workers) -> None:
    first, *others = workers.run(_runs, ranks=3)
    assert others == [first, first]


@pytest.mark.parametrize("row", [[], [None], [None, None]])
def test_a_step_without_actions_calls_no_stage(row: list[None]) -> None:
    stage = StandIn(1, 3, 0, 1)
    schedule = schedules.PipelineScheduleMulti([stage], 1)
    schedule.pipeline_order = {0: row}
    schedule._initialize_stages = lambda *args, **kwargs: None
    schedule._step_microbatches()
    assert stage.calls == []


def test_messages_are_added_around_an_idle_rank() -> None:
    rows = order("0F0 0B0", "", "1F0 1B0")
    found = schedules._add_send_recv(rows, {0: 0, 1: 2}.__getitem__, 2)
    assert {rank: [*map(str, row)] for rank, row in found.items()} == {
        0: ["0F0", "0SEND_F0", "0RECV_B0", "0B0"],
        1: [],
        2: ["1RECV_F0", "1F0", "1B0", "1SEND_B0"],
    }
