"""Skip connections: values for later stages, under every schedule, with the plain gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline.errors import SkipError
from taktline.runtime.program import Bound
from tests.runtime.test_errors import Outcomes, assert_all, make, run
from tests.runtime.test_errors import outcomes as outcomes


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
        (bound,) = schedule._runner._known.values()
        assert isinstance(bound, Bound)
        out = bound.works[rank].ports.activations_out
        return [len(layout.tensors) for layout in getattr(out, "_layouts", None) or ()]

    assert tl.local.run(main, 4) == [[2, 2], [1, 1], [1, 1], []]


class Puts(nn.Linear):
    """Puts and gets as it is told."""

    def __init__(self, puts: tuple[str, ...] = (), gets: tuple[str, ...] = ()) -> None:
        super().__init__(4, 4)
        self.puts = puts
        self.gets = gets

    def forward(self, input: Tensor) -> Tensor:
        x = input
        for name in self.gets:
            x = x + tl.skip.get(name)
        for name in self.puts:
            tl.skip.put(name, x)
        return super().forward(x)


class Recomputes(Puts):
    """Gets a value in a checkpointed block, and puts another one in its place."""

    def forward(self, input: Tensor) -> Tensor:
        x = checkpoint(lambda x: torch.sin(x + tl.skip.get("a")), input, use_reentrant=False)
        tl.skip.put("a", x)
        return super().forward(x + tl.skip.get("a"))


CASES: dict[str, tuple[tuple[Any, Any], str]] = {
    "never got": (
        (Puts(("a", "b")), Puts(("c",))),
        "rank 1, stage 1, micro-batch 0 (1F0): SkipError: no stage gets 'a' (put by stage 0), 'b' "
        "(put by stage 0), 'c' (put by stage 1); get each of them, or do not put it",
    ),
    "got too early": (
        (Puts(("a",), ("b",)), Puts(("b",), ("a",))),
        "rank 0, stage 0, micro-batch 0 (0F0): SkipError: stage 0 gets 'b', but no stage up to "
        "here has put it; put it in this stage or an earlier one, before it is got",
    ),
    "got under another name": (
        (Puts(("a", "b")), Puts((), ("A",))),
        "rank 1, stage 1, micro-batch 0 (1F0): SkipError: stage 1 gets 'A', but no stage up to "
        "here has put it; no stage has got 'a' (put by stage 0), 'b' (put by stage 0); put it in "
        "this stage or an earlier one, before it is got",
    ),
    "put twice": (
        (Puts(("a",)), Puts(("a",))),
        "rank 1, stage 1, micro-batch 0 (1F0): SkipError: 'a' is put by stage 0 and again by stage "
        "1, before any stage has got it; use a different name for each value",
    ),
    "replaced before it is got again": (
        (Puts(("a",)), Recomputes()),
        "rank 1, stage 1, micro-batch 0 (1B0): SkipError: a checkpointed block of stage 1 gets 'a' "
        "a second time, but the stage has put another value under that name since; use a "
        "different name",
    ),
}


def case(rank: int, group: Any, name: str) -> None:
    run(make(rank, group, module=CASES[name][0][rank]))


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_raise(outcomes: Outcomes, name: str) -> None:
    assert_all(outcomes(case, name), tl.StageError, CASES[name][1])


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
