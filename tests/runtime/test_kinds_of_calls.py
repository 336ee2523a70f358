"""What tells one kind of call from another: types, signs, autocast. Each of these was mixed up."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

import taktline as tl
from taktline.meta import Signature
from taktline.runtime.agreement import digest_of, inputs_of
from taktline.runtime.microbatch import Batch

CPU = torch.device("cpu")
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
        assert signature.describes([x, one])
        assert not signature.describes([x, other])
    assert Signature.of([math.nan]).describes([math.nan])


def test_texts_are_kept_apart() -> None:
    assert digest_of(["ab", "c"]) != digest_of(["a", "bc"])
    assert 0 <= digest_of(["\ud800"]) < 2**63


class Scales(nn.Module):
    """Hands a number on beside its output; the next stage notes it."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.first = first
        self.seen: list[float] = []

    def forward(self, x: Tensor, scale: float) -> Any:
        self.seen.append(scale)
        x = self.linear(x)
        return (x, scale) if self.first else x


def test_a_sign_reaches_the_next_stage() -> None:
    def main(rank: int) -> list[float]:
        module = Scales(first=rank == 0)
        stage = tl.PipelineStage(module, rank, 2, CPU)
        schedule = tl.ScheduleGPipe(stage, 2, nn.functional.mse_loss)
        x = torch.ones(4, 2)
        for scale in (0.0, -0.0, 1.0, 0.0):
            schedule.step(x, scale, target=x)
        return [math.copysign(1.0, scale) for scale in module.seen]

    assert tl.local.run(main, 2) == [[1, 1, -1, -1, 1, 1, 1, 1]] * 2


def test_the_same_shapes_under_autocast() -> None:
    def main(rank: int) -> int:
        stage = tl.PipelineStage(nn.Linear(4, 4), rank, 2, CPU)
        schedule = tl.ScheduleGPipe(stage, 2, lambda out, y: (out.float() - y).square().mean())
        x = torch.ones(4, 4)
        for enabled in (False, True, False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                schedule.step(x, target=x)
        return schedule.steps

    assert tl.local.run(main, 2) == [4, 4]


class Casts(nn.Module):
    """Casts its output to the type that a call asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.linear(x.float()).to(dtype)


def test_a_type_may_change_from_call_to_call() -> None:
    def main(rank: int) -> int:
        stage = tl.PipelineStage(Casts(), rank, 2, CPU)
        schedule = tl.ScheduleGPipe(stage, 2, nn.functional.mse_loss)
        x = torch.ones(4, 4)
        for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
            schedule.step(*[x, dtype][: 2 - rank], target=x)
        return schedule.steps

    assert tl.local.run(main, 2) == [4, 4]
