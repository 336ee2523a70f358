"""What stages know of their boundaries, and tell when it does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from taktline.compat.torch_pipelining import _utils as utils
from taktline.compat.torch_pipelining.schedules import ScheduleGPipe, _ScheduleForwardOnly
from taktline.compat.torch_pipelining.stage import PipelineStage
from tests.compat.peer import SINCE_2_12
from tests.compat.programs import BATCH, CPU, WIDTH, Program, loss_fn, wrapped
from tests.workers import Workers

PART = BATCH // 4


def _shown(rank: int, group: dist.ProcessGroup) -> list[Any]:
    program = Program(group, 2, [rank])
    (stage,) = program.stages
    schedule = ScheduleGPipe(stage, 4, loss_fn=loss_fn)
    shown = []
    for call in ("eval", "step"):
        program.step(schedule, call)
        meta = stage._stage_meta
        assert schedule._on_ours
        assert [(tuple(x.shape), x.stride, x.dtype) for x in meta.inputs + meta.outputs] == [
            ((PART, WIDTH), (WIDTH, 1), torch.float32)
        ] * 2
        assert stage.get_outputs_meta() == meta.outputs
        grads = [
            None if side is None else side[0] for side in (meta.input_grads, meta.output_grads)
        ]
        shown.append((meta.inputs[0].requires_grad, [grad is not None for grad in grads]))
    return shown


@SINCE_2_12
@pytest.mark.processes
def test_stages_show_what_crosses_their_boundaries(workers: Workers) -> None:
    """As those of torch do, though it is the runtime that has found it out."""
    first, last = workers.run(_shown)
    assert first == [(False, [False, False]), (False, [False, True])]
    assert last == [(False, [False, False]), (True, [True, False])]


def _announced_wrongly(rank: int, group: dist.ProcessGroup) -> str:
    wrong = torch.zeros(PART + rank, WIDTH, requires_grad=True)
    program = Program(group, 2, [rank], input_args=wrong)
    wrapped(program.stages[0])
    with pytest.raises(utils.PipeliningMetadataError, match="shape mismatch") as caught:
        program.step(ScheduleGPipe(program.stages[0], 4, loss_fn=loss_fn))
    return str(caught.value)


@SINCE_2_12
@pytest.mark.processes
def test_every_rank_raises_what_torch_raises_of_a_mismatch(workers: Workers) -> None:
    for told in workers.run(_announced_wrongly):
        assert told.startswith("rank 1: Stage 1 input[0]: shape mismatch: torch.Size([5, 8]) vs ")


@pytest.mark.usefixtures("fake_group")
def test_a_forward_only_schedule_has_no_order() -> None:
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, CPU)
    assert _ScheduleForwardOnly(stage, 2).pipeline_order is None
