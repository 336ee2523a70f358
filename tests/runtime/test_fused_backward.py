"""All stages in one thread, micro-batch by micro-batch: users see what the plan's order shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline.errors import StageError
from taktline.plan import Plan
from tests.runtime.cases import SCHEDULES

X, Y = torch.linspace(-1, 1, 32).reshape(8, 4), torch.zeros(8, 4)


class Noted(nn.Linear):
    """Notes its calls, and draws a random number in those that are to."""

    def __init__(self, stage: int, calls: list[int]) -> None:
        super().__init__(4, 4)
        self.stage, self.calls = stage, calls
        self.draws = False

    def forward(self, input: Tensor) -> Tensor:
        self.calls.append(self.stage)
        noise = torch.rand(()) if self.draws else torch.tensor(0.5)
        return torch.tanh(super().forward(input)) * noise


def pipeline(stages: list[Any], schedule: str = "1f1b", ranks: int = 2, **options: Any) -> Any:
    usual = {"microbatches": 4, "loss_fn": nn.functional.mse_loss}
    return tl.Pipeline(stages, schedule=schedule, ranks=ranks, **(usual | options))


def gradients(pipe: Any, *, traced: bool = False, **options: Any) -> list[Tensor]:
    """Those of one step; in a trace, every action runs by itself, in the plan's order."""
    pipe.zero_grad()
    if traced:
        with pipe.trace():
            pipe.step(X, target=Y, **options)
    else:
        pipe.step(X, target=Y, **options)
    return [p.grad.clone() for p in pipe.parameters() if p.grad is not None]


def test_a_micro_batch_goes_through_all_stages_before_the_next() -> None:
    calls: list[int] = []
    stages = [Noted(stage, calls) for stage in range(4)]
    pipe = pipeline(stages, "gpipe", ranks=4)
    pipe.step(X, target=Y)  # learns what crosses boundaries
    backward: list[int] = []
    for stage, module in enumerate(stages):
        module.weight.register_post_accumulate_grad_hook(lambda _, s=stage: backward.append(s))
    calls.clear()
    pipe.step(X, target=Y)
    assert calls == [0, 1, 2, 3] * 4
    assert backward == [3, 2, 1, 0] * 4


def test_where_ranks_draw_they_keep_the_order_of_the_plan() -> None:
    calls: list[int] = []
    stages = [Noted(stage, calls) for stage in range(4)]
    pipe = pipeline(stages, "interleaved_1f1b", stages_per_rank=2)
    pipe.step(X, target=Y)
    planned = calls.copy()
    calls.clear()
    pipe.step(X, target=Y)
    assert calls != planned
    stages[2].draws = True
    before = torch.get_rng_state()
    pipe.step(X, target=Y)  # unknown in advance; but the caller has drawn nothing
    assert torch.equal(torch.get_rng_state(), before)
    calls.clear()
    pipe.step(X, target=Y)
    assert calls == planned


class Checkpointed(nn.Module):
    """Puts and gets values, and adds a loss, in a block that runs again in the backward."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        if self.stage % 2 == 0:
            tl.skip.put("one of several", x + self.linear.bias)
        return checkpoint(self.compute, x, use_reentrant=False)

    def compute(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        if self.stage % 2:
            x = x * tl.skip.get("one of several")
        tl.add_loss(x.square().mean())
        return x


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_beside_the_output(schedule: str) -> None:
    torch.manual_seed(0)
    per_rank = min(2, SCHEDULES[schedule][-1])
    stages = [Checkpointed(stage) for stage in range(2 * per_rank)]
    pipe = pipeline(stages, schedule, stages_per_rank=per_rank)
    pipe.step(X, target=Y)
    found = gradients(pipe)
    expected = gradients(pipe, traced=True)
    assert len(found) == 2 * len(stages)
    torch.testing.assert_close(found, expected)


class Fails(torch.autograd.Function):
    """Cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("on purpose")


class May(nn.Linear):
    """Fails in its backward if it is to."""

    fails = False

    def forward(self, input: Tensor) -> Tensor:
        output = torch.tanh(super().forward(input))
        return Fails.apply(output) if self.fails else output  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("stage", range(4))
def test_an_error_in_a_backward_names_its_stage(schedule: str, stage: int) -> None:
    stages = [May(4, 4) for _ in range(4)]
    pipe = pipeline(stages, schedule, ranks=4 if schedule == "1f1b" else 2)
    expected = [pipe.step(X, target=Y), pipe.step(X, target=Y)][-1]
    stages[stage].fails = True
    with pytest.raises(StageError) as caught:
        pipe.step(X, target=Y)
    rank = stage if schedule == "1f1b" else [0, 1, 1, 0][stage]
    assert f"rank {rank}, stage {stage}, micro-batch 0 ({stage}B0)" in str(caught.value)
    assert "ValueError: on purpose" in str(caught.value)
    stages[stage].fails = False
    assert pipe.step(X, target=Y) == expected


class Lends(nn.Module):
    """Hands its weight on beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.linear.weight


class Borrows(nn.Module):
    """Uses the weight of the stage before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.linear(x) @ weight


def test_a_weight_that_is_handed_on_keeps_no_hooks() -> None:
    """Each micro-batch of each step left one on it."""
    first = Lends()
    pipe = pipeline([first, Borrows()])
    for _ in range(3):
        pipe.step(X, target=Y)
    assert not first.linear.weight._backward_hooks


def test_a_plan_with_another_order_backward_is_kept() -> None:
    calls: list[int] = []
    plan = Plan.from_actions([["0F0", "0F1", "1F0", "1F1", "1B1", "0B1", "1B0", "0B0"]])
    modules = [Noted(stage, calls) for stage in range(2)]
    stages = [tl.PipelineStage(m, s, 2, torch.device("cpu")) for s, m in enumerate(modules)]
    schedule = tl.ScheduleFromPlan(stages, plan, nn.functional.mse_loss)
    for _ in range(2):
        calls.clear()
        schedule.step(X, target=Y)
        assert calls == [0, 0, 1, 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_lone_rank(schedule: str) -> None:
    """Its gradients are those of the plan's order, to the last bit."""
    torch.manual_seed(0)
    per_rank = max(SCHEDULES[schedule])
    modules = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(per_rank)]
    stages = [tl.PipelineStage(m, s, per_rank, torch.device("cpu")) for s, m in enumerate(modules)]
    plan = tl.build(schedule, ranks=1, microbatches=4, stages_per_rank=per_rank)
    made = tl.ScheduleFromPlan(stages, plan, nn.functional.mse_loss)
    found = []
    for _ in range(2):
        for module in modules:
            module.zero_grad()
        made.step(X, target=Y)
        found.append([p.grad for m in modules for p in m.parameters()])
    assert all(map(torch.equal, *found))
