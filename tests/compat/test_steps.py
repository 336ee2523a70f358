"""Plain programs: the seven schedules with plain stages, which run on Taktline's own runtime."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.compat.peer import SINCE_2_12
from tests.compat.programs import CPU, WIDTH, Program, make_batch, schedules, stages
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


def _initialized(rank: int, group: dist.ProcessGroup, name: str) -> None:
    program = Program(group, 2 * PER_RANK[name], placed(name, rank, 2))
    schedule = make(name, program, 4)
    noun = "stages" if PER_RANK[name] > 1 else "stage"

    def flags() -> list[bool]:
        return [getattr(schedule, f"_{noun}_{way}_initialized") for way in ("forward", "backward")]

    assert flags() == [False, False]
    program.step(schedule, "eval")
    assert flags() == [True, False]
    program.train(schedule, 1)
    assert flags() == [True, True]
    assert schedule._on_ours
    # Call by call, stages have to find out for themselves.
    program.stages[0].forward_one_chunk = program.stages[0].forward_one_chunk
    program.train(schedule, 1)
    assert not schedule._on_ours


@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_a_step_says_that_stages_are_initialized(workers: Workers, name: str) -> None:
    workers.run(_initialized, name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_outputs_losses(workers: Workers, ranks: int, ours: bool) -> None:
    workers.run(_all_schedules, ours, ranks=ranks)


def _last_round(rank: int, group: dist.ProcessGroup, name: str) -> None:
    """16 micro-batches on three ranks: torch has no order for a round that is not full."""
    program = Program(group, 6, placed(name, rank, 3))
    schedule = make(name, program, 16)
    program.train(schedule)
    assert schedule._on_ours


@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
def test_the_last_round_need_not_be_full(workers: Workers, name: str) -> None:
    workers.run(_last_round, name, ranks=3)


def _uneven(rank: int, group: dist.ProcessGroup, ours: bool) -> list[str]:
    """What is said of batches of 16 in micro-batches that do not divide them."""
    program = Program(group, group.size(), [rank], calls=not ours)
    schedule = make("ScheduleGPipe", program, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            program.step(schedule)
        unscaled = make("ScheduleGPipe", program, 5, scale_grads=False)
        program.step(unscaled)
    assert schedule._on_ours is ours
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("ours", [True, pytest.param(False, marks=SINCE_2_12)])
def test_uneven_micro_batches_count_the_same_with_a_warning(workers: Workers, ours: bool) -> None:
    # Call by call, ranks cannot exchange micro-batches of different sizes.
    *others, last = workers.run(_uneven, ours, ranks=2 if ours else 1)
    assert others == [[]] * len(others)
    (text,) = last
    assert "differ in size (4, 3, 3, 3, 3 rows), and each of them counts the same" in text


class Scaled(nn.Module):
    """Takes a keyword of another size, and gives more than one value."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last = last

    def forward(self, x: Any, y: Any = None, *, factor: Any = None) -> Any:
        value = self.linear(x["x"] if isinstance(x, dict) else x)
        value = value if factor is None else value * factor.mean()
        return value + y if self.last else {"x": value}, *(() if self.last else (value.tanh(),))


def _values(rank: int, group: dist.ProcessGroup) -> None:
    """Nested values across the boundary, targets and keywords of any size, ready micro-batches."""
    torch.manual_seed(rank)
    module = Scaled(last=rank == 1)
    stage = stages().PipelineStage(module, rank, 2, CPU, group=group)

    def loss(output: Any, target: Any, power: int = 2) -> Any:
        return ((output[0] - target["y"]) ** power).mean()

    schedule = schedules().ScheduleGPipe(stage, 4, loss_fn=loss)
    x, target = make_batch()
    found = []
    for rows, ready in ((16, False), (16, True), (8, False)):
        module.zero_grad()
        given: dict[str, Any] = {"loss_kwargs": {"power": 4}}
        if rank == 0 and ready:
            given["arg_mbs"] = [(part,) for part in x[:rows].chunk(4)]
            given["kwarg_mbs"] = [{"factor": torch.full((2,), 2.0)}] * 4
        elif rank == 0:
            given["factor"] = torch.full((8,), 2.0)
        elif ready:
            given["target_mbs"] = [{"y": part} for part in target[:rows].chunk(4)]
        else:
            given["target"] = {"y": target[:rows]}
        schedule.step(*([x[:rows]] if rank == 0 and not ready else []), **given)
        found.append(module.linear.weight.grad)
    torch.testing.assert_close(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
    assert schedule._on_ours
    schedule.step(*([x[:3]] if rank == 0 else []), **({"target": {"y": x[:3]}} if rank else {}))


def test_values_and_batches_of_any_kind(workers: Workers) -> None:
    errors = workers.outcomes(_values)
    assert all(isinstance(error, RuntimeError) for error in errors), errors
    # The rank that has no batch of its own gets the error, too.
    assert all("3 along dimension 0" in str(error) for error in errors), errors
