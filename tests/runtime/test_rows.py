"""Batches that micro-batches do not divide: each row counts the same, and small ones run fewer."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import taktline as tl
from taktline.errors import BatchError
from taktline.runtime.microbatch import Replicate
from tests.runtime.scenarios import CPU
from tests.runtime.test_errors import make

DIM = 4
SIZES = [(32, 5), (17, 16), (6, 8), (1, 4), (16, 4)]
"""Rows, and micro-batches."""
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h2", "zbv", "dualpipev"]


class Adding(nn.Sequential):
    """A stage that adds a loss, which is a mean over rows, too."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, DIM), nn.Tanh())
        self.double()

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        tl.add_loss(output.square().mean())
        return output


def modules_for(plan: tl.Plan) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Adding() for _ in range(plan.stages)]


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, target = torch.randn(2, rows, DIM, dtype=torch.float64, generator=generator)
    return x, target


def expected(modules: list[nn.Module], rows: int, steps: int) -> tuple[list[Tensor], Tensor]:
    """The gradients of the plain model on the whole batch, and its loss."""
    model = nn.Sequential(*copy.deepcopy(modules))
    x, target = batch(rows)
    with tl.collect_losses() as added:
        loss = F.mse_loss(model(x), target)
    torch.stack([loss, *added]).sum().backward()
    return [steps * p.grad for p in model.parameters() if p.grad is not None], loss.detach()


@pytest.mark.parametrize(("rows", "microbatches"), SIZES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_trains_as_the_model_does(schedule: str, rows: int, microbatches: int) -> None:
    plan = tl.build(schedule, ranks=2, microbatches=microbatches)
    modules = modules_for(plan)
    gradients, loss = expected(modules, rows, steps=3)
    pipe = tl.Pipeline(modules, schedule=plan, loss_fn=F.mse_loss)
    x, target = batch(rows)
    losses: list[Tensor] = []
    # The first one learns what crosses boundaries.
    found = [pipe.step(x, target=target, losses=losses) for _ in range(3)]
    evaluated, output = pipe.eval(x, target=target, return_outputs=True)
    torch.testing.assert_close([*found, evaluated], [loss] * 4, rtol=1e-12, atol=0)
    torch.testing.assert_close([p.grad for p in pipe.parameters()], gradients, rtol=1e-11, atol=0)
    assert (len(losses), len(output)) == (min(rows, microbatches), rows)


def test_sizes_that_change_and_a_trace() -> None:
    plan = tl.build("1f1b", ranks=2, microbatches=4)
    pipe = tl.Pipeline(modules_for(plan), schedule=plan, loss_fn=F.mse_loss)
    with pipe.trace() as trace:
        for rows in (8, 3, 8, 5, 3):
            x, target = batch(rows)
            loss = pipe.step(x, target=target)
            torch.testing.assert_close(loss, expected(list(pipe.stages.values()), rows, 1)[1])
    assert [timeline.plan.microbatches for timeline in trace.timelines] == [4, 3, 4, 4, 3]


def test_a_plan_that_is_lowered_already() -> None:
    plan = tl.lower(tl.build("zbv", ranks=2, microbatches=4), keep_ready=1, reduce=True)
    modules = modules_for(plan)
    gradients, _ = expected(modules, 3, steps=1)
    pipe = tl.Pipeline(modules, schedule=plan, loss_fn=F.mse_loss)
    x, target = batch(3)
    pipe.step(x, target=target)
    torch.testing.assert_close([p.grad for p in pipe.parameters()], gradients)


def linear(**options: Any) -> tl.Pipeline:
    torch.manual_seed(0)
    stages = [nn.Linear(DIM, DIM).double() for _ in range(2)]
    usual = {"loss_fn": F.mse_loss, "ranks": 2, "microbatches": 4}
    return tl.Pipeline(stages, **(usual | options))


@pytest.mark.parametrize("rows", [7, 3])
def test_weights_override_rows(rows: int) -> None:
    pipe = linear()
    x, target = batch(rows)
    weights = [1.0, *[0.0] * (min(rows, 4) - 1)]
    first = x[: -(-rows // 4)]
    for run in (pipe.step, pipe.eval):
        loss = run(x, target=target, loss_weights=weights)
        alone = pipe.eval(first, target=target[: len(first)])
        torch.testing.assert_close(loss, alone)


def whole_rows(target: Tensor, rows: int) -> list[Tensor]:
    """Cut where the batch is."""
    return [part.flatten() for part in target.view(rows, -1).tensor_split(min(rows, 4))]


@pytest.mark.parametrize(
    ("rows", "entries", "spec", "cut"),
    [
        *((rows, 3 * rows, None, whole_rows) for rows in (7, 8, 3)),
        (8, 4, tl.TensorChunkSpec(0), lambda target, _: target.tensor_split(4)),  # by consent
        (8, 5, Replicate(), lambda target, _: [target] * 4),
    ],
)
def test_targets_with_other_rows_than_the_batch(
    rows: int, entries: int, spec: Any, cut: Callable[[Tensor, int], list[Tensor]]
) -> None:
    seen = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(target.tolist())
        return output.square().mean() + target.sum()

    pipe = linear(loss_fn=loss_fn, target_chunk_spec=spec)
    target = torch.arange(float(entries))
    pipe.step(torch.randn(rows, DIM, dtype=torch.float64), target=target)
    assert seen == [part.tolist() for part in cut(target, rows)]


def test_an_empty_batch() -> None:
    x = torch.ones(0, DIM, dtype=torch.float64)
    with pytest.raises(BatchError, match=re.escape("0 along dimension 0: it is empty")):
        linear().step(x, target=x)


def warned(schedule: Any, *sizes: int, ready: bool = False, **options: Any) -> list[str]:
    """What a schedule says of batches of these sizes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in sizes:
            x = torch.ones(size, DIM)
            if ready:
                chunks = x.tensor_split(4)
                schedule.step(arg_mbs=[(c,) for c in chunks], target_mbs=chunks, **options)
            else:
                schedule.step(x, target=x, **options)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("ready", [False, True])
def test_a_schedule_of_torchs_name_warns_once(ready: bool) -> None:
    schedule = make(0, None, num_stages=1, schedule=tl.ScheduleGPipe)
    assert warned(schedule, 8, 12, ready=ready) == []
    assert warned(schedule, 10, ready=ready, loss_weights=len) == []
    assert warned(schedule, 10, 10, ready=ready) == [
        "micro-batches differ in size (3, 3, 2, 2 rows), and each of them counts the same: the "
        "loss and its gradients are not those of the whole batch. Use batches that 4 micro-batches "
        "divide, pass loss_weights=… to a schedule of Taktline, or use its Pipeline with whole "
        "batches, which counts rows"
    ]
    assert warned(schedule, 11, ready=ready) == []


def test_who_counts_rows_or_sums_does_not_warn() -> None:
    stage = tl.PipelineStage(nn.Linear(DIM, DIM), 0, 1, CPU)
    plan = tl.build("gpipe", ranks=1, microbatches=4)
    assert warned(tl.ScheduleFromPlan([stage], plan, F.mse_loss), 10, 3) == []
    assert warned(tl.ScheduleGPipe(stage, 4, F.mse_loss, scale_grads=False), 10) == []


def test_sums_in_which_no_micro_batch_counts() -> None:
    """The step failed in the mean of no losses."""
    stage = tl.PipelineStage(nn.Linear(DIM, DIM), 0, 1, CPU)
    schedule = tl.ScheduleGPipe(stage, 4, F.mse_loss, scale_grads=False)
    x = torch.ones(8, DIM)
    schedule.step(x, target=x, loss_weights=[0] * 4, share_losses=True)
    assert schedule.loss is not None
    assert schedule.loss.isnan()


def test_scale_grads_can_be_set_later() -> None:
    stage = tl.PipelineStage(nn.Linear(DIM, DIM), 0, 1, CPU)
    schedule = tl.ScheduleGPipe(stage, 4, F.mse_loss)
    found = []
    for scaled in (True, True, False, True):
        stage.submod.zero_grad()
        schedule.scale_grads = scaled
        schedule.step(torch.ones(8, DIM), target=torch.zeros(8, DIM))
        found.append([p.grad for p in stage.submod.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    torch.testing.assert_close(found[2], [4 * g for g in found[0]])
    torch.testing.assert_close(found[3], found[0], rtol=0, atol=0)
