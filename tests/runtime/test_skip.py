"""Skip connections: values for later stages, under every schedule, with the plain gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import taktline as tl
from taktline.errors import SkipError
from taktline.runtime.program import Program


class Sometimes(nn.Linear):
    """The first one puts a value, some get it."""

    def __init__(self, stage: int, *, gets: bool) -> None:
        super().__init__(6, 6)
        self.stage = stage
        self.gets = gets

    def forward(self, input: Tensor) -> Tensor:
        if self.stage == 0:
            tl.skip.put("a", input * 2)
        return super().forward(input + tl.skip.get("a") if self.gets else input)


def test_a_value_goes_no_further_than_the_last_stage_that_gets_it() -> None:
    plan = tl.build("1f1b", ranks=4, microbatches=2)

    def main(rank: int) -> list[int]:
        stage = tl.PipelineStage(Sometimes(rank, gets=rank == 1), rank, 4, torch.device("cpu"))
        schedule = tl.ScheduleFromPlan([stage], plan, F.mse_loss)
        for _ in range(2):
            schedule.step(torch.ones(4, 6), target=torch.ones(4, 6))
        (program,) = schedule._runner._known.values()
        assert isinstance(program, Program)
        out = program.works[rank].ports.activations_out
        return [len(layout.tensors) for layout in getattr(out, "_layouts", None) or ()]

    assert tl.local.run(main, 4) == [[2, 2], [1, 1], [1, 1], []]


def test_something_that_is_no_tensor() -> None:
    with pytest.raises(SkipError) as caught:
        tl.skip.put("a", 3)  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == "skip.put('a', …) takes a tensor, not int"


def test_outside_of_a_pipeline() -> None:
    tl.skip.put("outside", torch.ones(1))
    tl.skip.put("outside", torch.zeros(1))
    with tl.collect_losses():  # which collects losses, and nothing else
        assert torch.equal(tl.skip.get("outside"), torch.zeros(1))
    with pytest.raises(SkipError) as caught:
        tl.skip.get("never put")
    assert str(caught.value).startswith("'never put' was not put before it is got; so far there")
