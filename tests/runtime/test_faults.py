"""An exception in any kind of action, anywhere, under every schedule: one error on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import taktline as tl
from taktline.plan import Kind, Plan
from tests.runtime.scenarios import CPU, SCHEDULES, plan_for
from tests.workers import Workers


@dataclass(frozen=True)
class Fault:
    """What fails: the forward, backward, weight step or loss of a stage, for a micro-batch."""

    kind: str
    stage: int
    microbatch: int

    @property
    def text(self) -> str:
        return f"out of luck in {self.kind} of stage {self.stage}"


class Stage(tl.PipelineStage):
    """A stage whose weight step may fail."""

    fault: Fault | None = None

    def backward_weight(self, microbatch: int) -> None:
        _maybe_fail(self.fault, "W", self.stage_index, microbatch)
        super().backward_weight(microbatch)


class Layer(nn.Module):
    """Fails in its forward, or in its backward, for the micro-batch that its input tells."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.index = index
        self.linear = nn.Linear(4, 4)
        self.fault: Fault | None = None

    def forward(self, x: Tensor, microbatch: Tensor) -> tuple[Tensor, Tensor]:
        number, fault = int(microbatch[0]), self.fault
        _maybe_fail(fault, "F", self.index, number)
        y = torch.tanh(self.linear(x))
        if y.requires_grad:
            y.register_hook(lambda _: _maybe_fail(fault, "B", self.index, number))
        return y, microbatch


def _maybe_fail(fault: Fault | None, kind: str, stage: int, microbatch: int) -> None:
    if fault is not None and (fault.kind, fault.stage, fault.microbatch) == (
        kind,
        stage,
        microbatch,
    ):
        raise RuntimeError(fault.text)


def faults(plan: Plan) -> Iterator[Fault]:
    """Each kind in the first, a middle and the last stage, early and late in the step."""
    last, stages = plan.microbatches - 1, plan.stages
    rows = plan.rows[plan.rows.kind == Kind.W]
    weights = list(zip(rows.stage.tolist(), rows.microbatch.tolist(), strict=True))
    for stage, microbatch in sorted({*weights[:1], *weights[-1:]}):
        yield Fault("W", stage, microbatch)
    for kind in ("F", "B"):
        yield Fault(kind, 0, last)
        yield Fault(kind, stages // 2, 0)
        yield Fault(kind, stages - 1, 1)
    yield Fault("loss", stages - 1, 0)
    yield Fault("loss", stages - 1, last)


def run_faults(rank: int, group: Any, schedule: str, ranks: int) -> list[tuple[str, str, str]]:
    """Each fault on the same objects, with a step after it whose gradients must be right."""
    plan = plan_for(schedule, ranks)
    modules = {s: Layer(s) for s in plan.placement.stages_of(rank)}
    stages = [Stage(m, s, plan.stages, CPU, group=group) for s, m in modules.items()]
    due: list[Fault | None] = [None]

    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        _maybe_fail(due[0], "loss", plan.stages - 1, int(output[1][0]))
        return F.mse_loss(output[0], target)

    runner = tl.ScheduleFromPlan(stages, plan, loss_fn)

    def step() -> list[Tensor]:
        for module in modules.values():
            module.zero_grad()
        x = torch.linspace(-1, 1, 32).view(8, 4)
        runner.step(x, torch.arange(8) // 2, target=x.cos(), return_outputs=False)
        return [
            p.grad.clone() for m in modules.values() for p in m.parameters() if p.grad is not None
        ]

    def _set(fault: Fault | None) -> None:
        due[0] = fault
        for stage in stages:
            stage.fault = modules[stage.stage_index].fault = fault

    def fail(fault: Fault) -> tuple[str, str, str]:
        _set(fault)
        with pytest.raises(tl.StageError) as caught:
            step()
        _set(None)
        failed_here = rank == plan.placement.rank_of[fault.stage]
        assert (caught.value.__cause__ is not None) == failed_here
        return str(fault), str(caught.value), caught.value.action

    fail(next(faults(plan)))  # in a first step
    expected, told = step(), []
    for fault in faults(plan):
        told.append(fail(fault))
        assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True)), fault
    return told


def check(found: list[list[tuple[str, str, str]]], plan: Plan) -> None:
    assert all(told == found[0] for told in found)
    for fault, (_, text, action) in zip(faults(plan), found[0], strict=True):
        kinds = {"loss": "F", "B": "BI"}.get(fault.kind, fault.kind)
        assert action in [f"{fault.stage}{kind}{fault.microbatch}" for kind in kinds]
        rank = plan.placement.rank_of[fault.stage]
        where = f"rank {rank}, stage {fault.stage}, micro-batch {fault.microbatch} ({action})"
        assert text == f"{where}: RuntimeError: {fault.text}"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_local(schedule: str, ranks: int) -> None:
    check(tl.local.run(run_faults, ranks, None, schedule, ranks), plan_for(schedule, ranks))


@pytest.mark.processes
@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gloo(workers: Workers, schedule: str) -> None:
    check(workers.run(run_faults, schedule, 4, ranks=4), plan_for(schedule, 4))
