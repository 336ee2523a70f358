"""Plain programs: the seven schedules with plain stages, which run on Taktline's own runtime."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests.compat.programs import Program, schedules
from tests.workers import Workers

pytestmark = pytest.mark.processes

PER_RANK = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}


def placed(name: str, rank: int, ranks: int) -> list[int]:
    if PER_RANK[name] == 1:
        return [rank]
    v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    return [rank, 2 * ranks - 1 - rank if v else rank + ranks]


def make(name: str, program: Program, microbatches: int, **options: Any) -> Any:
    mine = program.stages if PER_RANK[name] > 1 else program.stages[0]
    return getattr(schedules(), name)(mine, microbatches, loss_fn=nn.functional.mse_loss, **options)


def _all_schedules(rank: int, group: dist.ProcessGroup, ours: bool) -> None:
    ranks = group.size()
    for name, per_rank in PER_RANK.items():
        program = Program(group, ranks * per_rank, placed(name, rank, ranks))
        for stage in program.stages:
            stage._runtime_validate = not ours
        schedule = make(name, program, 8, scale_grads=name != "ScheduleLoopedBFS")
        program.step(schedule, "eval")
        assert all(p.grad is None for m in program.modules.values() for p in m.parameters())
        program.train(schedule)
        assert schedule._on_ours is ours
        program.step(schedule, "eval")
        program.train(schedule, 1)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_outputs_losses(workers: Workers, ranks: int, ours: bool) -> None:
    workers.run(_all_schedules, ours, ranks=ranks)
