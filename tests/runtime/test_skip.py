"""Skip connections: values for later stages, under every schedule, with the plain gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline.errors import SkipError
from taktline.runtime.ports import Outgoing
from taktline.runtime.program import Bound
from tests.runtime.cases import SCHEDULES
from tests.runtime.scenarios import (
    Batch,
    Scenario,
    assert_same,
    plan_for,
    run_gloo,
    run_local,
    run_plain,
)
from tests.runtime.test_errors import Outcomes, assert_all, make, run
from tests.runtime.test_errors import outcomes as outcomes
from tests.workers import Workers

WIDTH = 4


class Down(nn.Module):
    """A level of a U-Net: puts what it sees at its resolution, and halves that."""

    def __init__(self, level: int, channels: int) -> None:
        super().__init__()
        self.level = level
        self.block = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.block(x)))
        tl.skip.put(f"level {self.level}", x)
        return F.avg_pool2d(x, 2)


class Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.block(x))


class Up(nn.Module):
    """The way back: doubles the resolution, and joins what was put there."""

    def __init__(self, level: int, channels: int) -> None:
        super().__init__()
        self.level = level
        self.block = nn.Conv2d(2 * channels, channels // 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2)
        x = torch.cat([x, tl.skip.get(f"level {self.level}")], dim=1)
        return F.silu(self.block(x))


def unet(stages: int) -> list[nn.Module]:
    """A U-Net of three levels, cut into so many stages."""
    levels = 3
    layers: list[nn.Module] = [Down(i, WIDTH * 2**i) for i in range(levels)]
    layers.append(Middle(WIDTH * 2**levels))
    layers += [Up(i, WIDTH * 2 ** (i + 1)) for i in reversed(range(levels))]
    layers.append(nn.Conv2d(WIDTH, WIDTH, 1))
    bounds = [round(i * len(layers) / stages) for i in range(stages + 1)]
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(bounds)]


def images(number: int, size: int) -> Batch:
    return (torch.randn(size, WIDTH, 8, 8),), {}, torch.randn(size, WIDTH, 8, 8)


class Shared(nn.Module):
    """Every stage uses what the first one puts, positions and a mask among it, and adds to it."""

    def __init__(self, stage: int, count: int, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.stage = stage
        self.linear = nn.Linear(6, 6)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.stage == 0:
            tl.skip.put("origin", x @ self.linear.weight)
            tl.skip.put("positions", torch.arange(x.shape[0], device=x.device))
            tl.skip.put("running", x.sum(1, keepdim=True) + self.linear.bias.sum())
        running = tl.skip.get("running")
        tl.skip.put("running", running * 0.5)
        x = x + tl.skip.get("running")
        if self.checkpointed:
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        x = x + tl.skip.get("origin") + tl.skip.get("positions")[:, None]
        tl.skip.put(f"made by {self.stage}", torch.sin(x))
        x = x * tl.skip.get(f"made by {self.stage}")
        return torch.tanh(self.linear(x))


class Jump(Shared):
    """Only the last stage gets what the first one puts; the ones between hand it on."""

    def __init__(self, stage: int, count: int) -> None:
        super().__init__(stage, count)
        self.last = stage == count - 1

    def forward(self, x: Tensor) -> Tensor:
        if self.stage == 0:
            tl.skip.put("far", x @ self.linear.weight)
        if self.last:
            x = x * tl.skip.get("far")
        return torch.tanh(self.linear(x))


def vectors(number: int, size: int) -> Batch:
    return (torch.randn(size, 6),), {}, torch.randn(size, 6)


SCENARIOS = {
    "unet": Scenario(unet, images),
    "shared": Scenario(lambda count: [Shared(s, count) for s in range(count)], vectors),
    "checkpointed": Scenario(
        lambda count: [Shared(s, count, checkpointed=True) for s in range(count)], vectors
    ),
    "far": Scenario(lambda count: [Jump(s, count) for s in range(count)], vectors),
}
# Gradients of a value that several stages use are added up from the back, stage by stage; the
# plain model adds them in the order of its graph.
EXACT = ("unet", "far")


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_local(schedule: str, name: str, ranks: int) -> None:
    plan = plan_for(schedule, ranks)
    found = run_local(SCENARIOS[name], plan)
    assert_same(found, run_plain(SCENARIOS[name], plan), exact=name in EXACT)


@pytest.mark.sampled(3)
@pytest.mark.processes
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gloo(workers: Workers, schedule: str, name: str) -> None:
    plan = plan_for(schedule, 4)
    found = workers.run(run_gloo, __name__, name, plan, {}, ranks=4)
    assert_same(found, run_plain(SCENARIOS[name], plan), exact=name in EXACT)


@pytest.mark.processes
@pytest.mark.parametrize("name", SCENARIOS)
def test_gloo_with_dynamic_shapes(workers: Workers, name: str) -> None:
    plan = plan_for("ScheduleInterleavedZeroBubble", 4)
    found = workers.run(run_gloo, __name__, name, plan, {"dynamic_shapes": True}, ranks=4)
    assert_same(found, run_plain(SCENARIOS[name], plan), exact=name in EXACT)


def test_compiled_blocks() -> None:
    def compiled(count: int) -> list[nn.Module]:
        stages: list[nn.Module] = [Jump(s, count) for s in range(count)]
        for stage in stages:
            stage.compile(backend="eager")
        return stages

    plan = plan_for("Schedule1F1B", 2)
    scenario = Scenario(compiled, vectors)
    assert_same(run_local(scenario, plan), run_plain(SCENARIOS["far"], plan))


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
        return [len(layout.tensors) for layout in out._layouts] if isinstance(out, Outgoing) else []

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


def never_got(rank: int, group: Any) -> None:
    module = Puts(("a", "b")) if rank == 0 else Puts(("c",))
    run(make(rank, group, module=module))


def test_values_that_nobody_gets_are_reported_together(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(never_got),
        tl.StageError,
        "rank 1, stage 1, micro-batch 0 (1F0): SkipError: no stage gets 'a' (put by stage 0), 'b' "
        "(put by stage 0), 'c' (put by stage 1); get each of them, or do not put it",
    )


def got_too_early(rank: int, group: Any) -> None:
    module = Puts(("a",), ("b",)) if rank == 0 else Puts(("b",), ("a",))
    run(make(rank, group, module=module))


def test_a_value_that_is_got_before_it_is_put(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(got_too_early),
        tl.StageError,
        "rank 0, stage 0, micro-batch 0 (0F0): SkipError: stage 0 gets 'b', but no stage up to "
        "here has put it; put it in this stage or an earlier one, before it is got",
    )


def got_under_another_name(rank: int, group: Any) -> None:
    module = Puts(("a", "b")) if rank == 0 else Puts((), ("A",))
    run(make(rank, group, module=module))


def test_a_value_that_is_got_under_another_name(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(got_under_another_name),
        tl.StageError,
        "rank 1, stage 1, micro-batch 0 (1F0): SkipError: stage 1 gets 'A', but no stage up to "
        "here has put it; no stage has got 'a' (put by stage 0), 'b' (put by stage 0); put it in "
        "this stage or an earlier one, before it is got",
    )


def put_twice(rank: int, group: Any) -> None:
    run(make(rank, group, module=Puts(("a",))))


def test_a_value_that_is_put_again_before_it_was_got(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(put_twice),
        tl.StageError,
        "rank 1, stage 1, micro-batch 0 (1F0): SkipError: 'a' is put by stage 0 and again by stage "
        "1, before any stage has got it; use a different name for each value",
    )


class Recomputes(Puts):
    """Gets a value in a checkpointed block, and puts another one in its place."""

    def forward(self, input: Tensor) -> Tensor:
        x = checkpoint(lambda x: torch.sin(x + tl.skip.get("a")), input, use_reentrant=False)
        tl.skip.put("a", x)
        return super().forward(x + tl.skip.get("a"))


def recomputed(rank: int, group: Any) -> None:
    run(make(rank, group, module=Recomputes() if rank else Puts(("a",))))


def test_a_checkpointed_block_that_gets_what_was_replaced_since(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(recomputed),
        tl.StageError,
        "rank 1, stage 1, micro-batch 0 (1B0): SkipError: a checkpointed block of stage 1 gets 'a' "
        "a second time, but the stage has put another value under that name since; use a "
        "different name",
    )


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
