"""Shapes: learned without help, free to change, and learning them disturbs nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import taktline as tl
from taktline.errors import BatchError
from tests.runtime.scenarios import (
    CPU,
    SCHEDULES,
    plan_for,
)
from tests.runtime.test_errors import Outcomes
from tests.runtime.test_errors import outcomes as outcomes
from tests.workers import Workers

DIM = 6


def lengths(rank: int, group: Any, schedule: str) -> dict[str, Tensor | None]:
    """Batches of more lengths than are remembered, each micro-batch with its own, and again."""
    plan = plan_for(schedule, 2)
    torch.manual_seed(7)
    modules = [nn.Linear(DIM, DIM) for _ in range(plan.stages)]
    mine = plan.placement.stages_of(rank)
    stages = [tl.PipelineStage(modules[s], s, plan.stages, CPU, group=group) for s in mine]
    runner = tl.ScheduleFromPlan(stages, plan, F.mse_loss)
    for number in (*range(10), *range(4), 9, 9):
        x = cut_already(number)
        runner.step(
            arg_mbs=[(part,) for part in x],
            target_mbs=[part.cos() for part in x],
            return_outputs=False,
        )
    return {f"{s}.{n}": p.grad for s in mine for n, p in modules[s].named_parameters()}


def cut_already(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(2, 3 + (number + m) % 7, DIM, generator=generator) for m in range(4)]


@pytest.mark.processes
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_length_of_its_own_for_each_micro_batch(workers: Workers, schedule: str) -> None:
    plan = plan_for(schedule, 2)
    torch.manual_seed(7)
    model = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(plan.stages)])
    for number in (*range(10), *range(4), 9, 9):
        for part in cut_already(number):
            (F.mse_loss(model(part), part.cos()) / 4).backward()
    first, second = workers.run(lengths, schedule, ranks=2)
    expected = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(first | second, expected)


def joined(rank: int, group: Any) -> None:
    stage = tl.PipelineStage(nn.Linear(DIM, DIM), rank, 2, CPU, group=group)
    schedule = tl.Schedule1F1B(stage, 4, F.mse_loss)
    parts = cut_already(0)
    schedule.step(arg_mbs=[(part,) for part in parts], target_mbs=parts)


def test_outputs_that_cannot_be_joined(outcomes: Outcomes) -> None:
    for error in outcomes(joined):
        assert isinstance(error, BatchError)
        assert str(error).startswith("rank 1: output cannot be joined along dimension 0: ")
        assert str(error).endswith("; pass return_outputs=False if you do not need them")


class Watches(nn.Module):
    """Counts its forwards, and looks at what could be disturbed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        assert self.linear.weight.grad is None or self.forwards > 1
        return self.norm(self.linear(x))


def test_learning_runs_nothing_twice_and_draws_no_random_numbers() -> None:
    def main(rank: int) -> None:
        module = Watches()
        stage = tl.PipelineStage(module, rank, 2, CPU)
        schedule = tl.ScheduleGPipe(stage, 4, F.mse_loss)
        x, target = torch.randn(2, 8, DIM)
        state = torch.get_rng_state()
        schedule.step(x, target=target)
        assert torch.equal(torch.get_rng_state(), state)
        assert module.forwards == 4
        assert module.norm.state_dict()["num_batches_tracked"] == 4

    tl.local.run(main, 2)


class Grows(nn.Linear):
    """Gives more in training than in evaluation mode."""

    def forward(self, input: Tensor) -> Any:
        y = super().forward(input)
        return (y, y.sin()) if self.training else y


class Ends(nn.Linear):
    def forward(self, input: Tensor, *others: Tensor) -> Tensor:
        return super().forward(sum(others, start=input))


def test_what_a_stage_gives_may_depend_on_its_mode() -> None:
    def main(rank: int) -> list[Tensor]:
        torch.manual_seed(rank)
        module = Ends(DIM, DIM) if rank else Grows(DIM, DIM)
        stage = tl.PipelineStage(module, rank, 2, CPU)
        schedule = tl.Schedule1F1B(stage, 2, F.mse_loss)
        outputs = []
        for trains in (True, False, True, False):
            module.train(trains)
            outputs.append(schedule.step(torch.ones(4, DIM), target=torch.ones(4, DIM)))
            outputs.append(schedule.eval(torch.ones(4, DIM)))
        return outputs

    _, outputs = tl.local.run(main, 2)
    torch.testing.assert_close(outputs[:4], outputs[4:])
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[2], outputs[3])
    assert not torch.equal(outputs[0], outputs[2])
