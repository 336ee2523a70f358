"""Losses: with more arguments, from any stage, weighted, and told on every rank."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import taktline as tl
from taktline.errors import LossError
from tests.runtime.features import DIM, Experts
from tests.runtime.scenarios import CPU, SCHEDULES, plan_for
from tests.runtime.test_errors import Outcomes, make
from tests.runtime.test_errors import outcomes as outcomes
from tests.workers import Workers


def loss_of_numbers(output: Tensor, target: Tensor) -> Tensor:
    if target.isnan().any():
        raise RuntimeError("no loss")
    return F.mse_loss(output, target)


def handed_on(rank: int, group: Any, schedule: str, fails: bool = False) -> list[Tensor]:
    """The losses of two steps, of which the ranks read none to tell each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("taktline.runtime.runner._READ_AT_ONCE", ())
        plan = plan_for(schedule, 3)
        stages = [
            tl.PipelineStage(nn.Linear(4, 4), s, plan.stages, CPU, group=group)
            for s in plan.placement.stages_of(rank)
        ]
        runner = tl.ScheduleFromPlan(stages, plan, loss_of_numbers)
        torch.manual_seed(1)
        x = torch.randn(9, 4)
        if fails:
            bad = x.index_fill(0, torch.tensor(6), float("nan"))
            with pytest.raises(tl.StageError, match="micro-batch 2"):
                runner.step(x, target=bad, share_losses=True)
        found: list[Tensor | None] = []
        for scale in (1.0, 2.0):
            losses: list[Tensor] = []
            x = scale * torch.randn(9, 4)
            runner.step(x, target=x, losses=losses, share_losses=True, return_outputs=False)
            found += [*losses, runner.loss]
        runner.eval(x, share_losses=True)
        assert runner.loss is None
        return [loss for loss in found if loss is not None]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fails", [False, True], ids=["", "after a failure"])
def test_losses_that_nobody_reads_reach_every_rank(schedule: str, fails: bool) -> None:
    found = tl.local.run(handed_on, 3, None, schedule, fails)
    assert len(found[0]) == 10
    torch.testing.assert_close(found[1:], found[:1] * 2, rtol=0, atol=0)
    assert len({float(loss) for loss in found[0]}) == len(found[0])


@pytest.mark.processes
def test_losses_that_nobody_reads_reach_every_process(workers: Workers) -> None:
    found = workers.run(handed_on, "ScheduleZBVZeroBubble", ranks=3)
    assert found[0] == found[1] == found[2]


READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_step_reads_no_tensor(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, each of these would wait until it has computed everything."""
    stages = [nn.Linear(4, 4) for _ in range(4 if schedule == "zbv" else 2)]
    pipe = tl.Pipeline(stages, schedule=schedule, microbatches=3, ranks=2, loss_fn=F.mse_loss)
    pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))
    read: list[str] = []
    for name in READS:
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda *args, name=name, method=method: read.append(name) or method(*args),
        )
    loss = pipe.step(torch.randn(8, 4), target=torch.randn(8, 4), losses=[])
    assert read == []
    assert float(loss) > 0
    assert read == ["__float__"]


def told_as(dtype: torch.dtype, value: float) -> Any:
    """A loss function whose losses are of a type."""
    return lambda output, target: (0 * (output - target).real.sum() + value).to(dtype)


def of_type(rank: int, group: Any, dtype: torch.dtype, call: str) -> Tensor | None:
    stage = tl.PipelineStage(Adds(rank), rank, 2, CPU, group=group)
    schedule = tl.Schedule1F1B(stage, 4, told_as(dtype, 3.0))
    x = torch.ones(8, 4)
    getattr(schedule, call)(x, target=x, share_losses=True)
    return schedule.loss


EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        *product(["eval"], [*EIGHT_BITS, torch.int64, torch.uint8, torch.int8, torch.bool]),
        *product(["step"], [*EIGHT_BITS, torch.float64, torch.bfloat16, torch.float16]),
    ],
    ids=str,
)
def test_losses_of_each_type(outcomes: Outcomes, call: str, dtype: torch.dtype) -> None:
    others = torch.float64 if dtype.itemsize == 8 or not dtype.is_floating_point else dtype
    shared = torch.float32 if dtype in EIGHT_BITS else others
    value = torch.tensor(1.0 if dtype is torch.bool else 3.0, dtype=shared)
    found = outcomes(of_type, dtype, call)
    torch.testing.assert_close(found, [value, value], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "call", "text"),
    [
        (torch.int64, "step", "the loss depends on nothing that requires a gradient"),
        (torch.complex64, "step", "loss_fn must return a real number, not one of torch.complex64"),
        (torch.complex64, "eval", "loss_fn must return a real number, not one of torch.complex64"),
    ],
)
def test_losses_of_types_that_cannot_be_minimised(
    outcomes: Outcomes, dtype: torch.dtype, call: str, text: str
) -> None:
    for error in outcomes(of_type, dtype, call):
        assert isinstance(error, tl.StageError)
        assert f"rank 1, stage 1, micro-batch 0 (1F0): LossError: {text}" in str(error)


def test_without_sharing_each_rank_has_its_own() -> None:
    def main(rank: int) -> tuple[int, float]:
        torch.manual_seed(rank)
        schedule = make(rank, None, module=nn.Identity() if rank else Adds(rank))
        losses: list[Tensor] = []
        aux: list[Tensor] = []
        x = torch.ones(8, 4)
        schedule.step(x, target=x, losses=losses, aux_losses=aux)
        return len(losses), float(sum(aux))

    assert tl.local.run(main, 2) == [(0, 4.0), (4, 0.0)]


class Adds(nn.Linear):
    def __init__(self, stage: int) -> None:
        super().__init__(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        tl.add_loss(torch.ones(()))
        return super().forward(input)


class AddsAtTimes(nn.Linear):
    """Adds what its input says, unless that is 0."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, input: Tensor) -> Tensor:
        if input[0]:
            tl.add_loss(input.detach().sum() + 0 * self.weight.sum())
        return super().forward(input)


def test_a_loss_that_some_microbatches_add_is_theirs_alone() -> None:
    stage = tl.PipelineStage(AddsAtTimes(), 0, 1, CPU)
    schedule = tl.ScheduleGPipe(stage, 5, loss_fn=F.mse_loss)
    for values in ([1.0, 0, 2, 0, 0], [1.0, 0, 2, 0, 0], [0.0, 3, 0, 4, 0]):
        aux: list[Tensor] = []
        x = torch.tensor(values)[:, None]
        schedule.step(x, target=x, aux_losses=aux)
        assert [float(loss) for loss in aux] == values


def test_outside_of_a_pipeline_losses_are_for_whom_asks() -> None:
    model = Experts(0)
    x = torch.randn(3, DIM)
    model(x)
    with tl.collect_losses() as losses:
        model(x)
        model(x)
    assert len(losses) == 2
    assert all(loss.requires_grad for loss in losses)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (3.0, "add_loss takes one number as a tensor, not float"),
        (torch.ones(2), "add_loss takes one number as a tensor, not a tensor of shape [2]"),
        (
            torch.tensor(1j),
            "add_loss takes a real number, not one of torch.complex64: which of two complex losses "
            "is less is not defined; take its abs() or real",
        ),
    ],
    ids=["float", "vector", "complex"],
)
def test_something_that_is_no_loss(loss: Any, text: str) -> None:
    with pytest.raises(LossError) as caught:
        tl.add_loss(loss)
    assert str(caught.value) == text
