"""What may change from call to call: shapes, which are learned, types, signs, autocast, modes."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import taktline as tl
from taktline.errors import BatchError
from taktline.meta import Signature
from taktline.runtime.agreement import digest_of, inputs_of
from taktline.runtime.microbatch import Batch
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


# Python's hash is the same for many of these, and == for some.
VALUES: list[Any] = [-1, -2, 1, True, 1.0, 0, False, 2**61 - 1, 0.0, -0.0, "1", "", None, math.inf]
VALUES += [1j, b"1", torch.float32, torch.bfloat16]


def looks(*args: Any) -> int:
    return inputs_of(Batch(args), [])


def test_calls_with_different_values_look_different() -> None:
    x = torch.ones(4, 2)
    assert len({looks(x, value) for value in VALUES}) == len(VALUES)
    assert looks(x, math.nan) == looks(x, math.nan)
    for one, other in combinations(VALUES, 2):
        signature = Signature.of([x, one])
        assert not signature.difference([x, one])
        assert signature.difference([x, other])
    assert not Signature.of([math.nan]).difference([math.nan])


def test_texts_are_kept_apart() -> None:
    assert digest_of(["ab", "c"]) != digest_of(["a", "bc"])
    assert 0 <= digest_of(["\ud800"]) < 2**63


class Casts(nn.Linear):
    """Casts its output to the type that a call asks for, and hands on the factor of a loss."""

    def __init__(self, first: bool) -> None:
        super().__init__(4, 4)
        self.first = first
        self.seen: list[Any] = []

    def forward(self, input: Tensor, factor: float = 1.0, dtype: str = "float32") -> Any:
        self.seen.append((math.copysign(1.0, factor), dtype, torch.is_autocast_enabled("cpu")))
        x = super().forward(input.float()).to(getattr(torch, dtype))
        return (x, factor, dtype) if self.first else x


def test_a_sign_a_type_and_autocast_may_change_from_call_to_call() -> None:
    single, half = "float32", "bfloat16"
    calls = [(0.0, single, False), (-0.0, single, False), (1.0, half, False), (0.0, single, True)]
    calls = [*calls, calls[1], calls[3], calls[2], calls[0]]

    def main(rank: int) -> list[Any]:
        module = Casts(first=rank == 0)
        stage = tl.PipelineStage(module, rank, 2, CPU)
        schedule = tl.ScheduleGPipe(stage, 2, lambda out, y: (out.float() - y).square().mean())
        x = torch.ones(4, 4)
        for factor, dtype, enabled in calls:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                schedule.step(x, factor, dtype, target=x)
        return module.seen

    seen = [(math.copysign(1.0, factor), *rest) for factor, *rest in calls for _ in range(2)]
    assert tl.local.run(main, 2) == [seen] * 2
