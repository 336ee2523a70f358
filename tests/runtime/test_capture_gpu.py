"""Captured steps on a GPU: the same gradients, losses and random numbers as eagerly."""

from __future__ import annotations

import gc
import os
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import taktline as tl
from tests.runtime.test_capture import (
    CHANGES,
    WIDTH,
    Mixed,
    Pair,
    Scaled,
    Stage,
    Weighted,
    compare_tied,
    tied_pipelines,
)
from tests.runtime.test_capture_state import Averaging, Counting, Moving, Remembering, Replacing

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
    "dualpipev": 2,
}


def on_gpu(stages: Callable[[], Sequence[nn.Module]] | None = None, **options: Any) -> Pair:
    return Pair(stages, device="cuda", **options)


def train(pair: Pair, steps: int = 7, **options: Any) -> None:
    """Compare several steps, with an optimizer between them."""
    optimizers = [torch.optim.SGD(pipe.parameters(), 0.05) for pipe in pair.both]
    for seed in range(steps):
        pair.step(seed=seed, **options)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=seed % 2 == 0)


def is_captured(pair: Pair, replays: int) -> bool:
    return re.search(rf"captured.*, {replays} replay", str(pair.pipe)) is not None


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule: str, ranks: int) -> None:
    count = ranks * SCHEDULES[schedule]
    pair = on_gpu(
        lambda: [Stage() for _ in range(count)], schedule=schedule, ranks=ranks, microbatches=8
    )
    train(pair)
    assert "captured, 4 micro-batches side by side, 4 replays" in str(pair.pipe), str(pair.pipe)


def test_microbatches_that_take_much_memory_run_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taktline.runtime.capture.cuda._SHARE", 1e-9)
    pair = on_gpu(microbatches=8)
    train(pair)
    assert "captured, 4 replays" in str(pair.pipe), str(pair.pipe)


class Dropping(Stage):
    """Leaves an old pipeline to the collector, once a step is captured."""

    old: ClassVar[list[object]] = []

    def forward(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            self.old.clear()
            _ = [[number] for number in range(1000)]
        return super().forward(x)


def test_an_old_graph_is_not_freed_within_a_capture() -> None:
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()  # else full collections would be rare
    gc.set_threshold(50, 1, 1)
    try:
        for _ in range(2):
            pair = on_gpu(lambda: [Dropping() for _ in range(4)])
            train(pair)
            assert is_captured(pair, 4), str(pair.pipe)
            around: list[object] = [pair]
            around.append(around)  # so that only the collector frees it
            Dropping.old.append(around)
            del pair, around
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
        Dropping.old.clear()


class Wide(nn.Module):
    """Its gradients are added as they come, others when the micro-batch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2**20), nn.Linear(2**20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()) * 1e-3


def test_large_gradients_side_by_side() -> None:
    pair = on_gpu(lambda: [Stage(), Wide(), Stage(), Stage()], microbatches=8)
    ballast = torch.empty(2**33, dtype=torch.uint8, device="cuda")
    train(pair)
    assert "captured, 4 micro-batches side by side, 4 replays" in str(pair.pipe), str(pair.pipe)
    del ballast


@pytest.mark.parametrize("ranks", [1, 2])
def test_dropout_draws_the_same_numbers(ranks: int) -> None:
    pair = on_gpu(lambda: [Stage(0.5) for _ in range(4)], ranks=ranks)
    optimizers = [torch.optim.SGD(pipe.parameters(), 0.05) for pipe in pair.both]
    x, target = torch.randn(2, 8, WIDTH).unbind()
    torch.cuda.manual_seed(3)
    states = [torch.cuda.get_rng_state() for _ in pair.both]
    for number in range(8):
        found = []
        for place, (pipe, optimizer) in enumerate(zip(pair.both, optimizers, strict=True)):
            torch.cuda.set_rng_state(states[place])
            if number == 6:
                torch.cuda.manual_seed(11)
            found.append(pipe.step(x, target=target).item())
            found.append(torch.rand((), device="cuda").item())
            states[place] = torch.cuda.get_rng_state()
            optimizer.step()
            optimizer.zero_grad()
        assert found[:2] == found[2:], number
    assert is_captured(pair, 5), str(pair.pipe)


class Recomputing(Stage):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # pyright: ignore


def test_checkpoints_draw_the_same_numbers_again() -> None:
    pair = on_gpu(lambda: [Recomputing(0.5) for _ in range(2)], ranks=1)
    for number in range(6):
        x, target = torch.randn(2, 8, WIDTH, device="cuda").unbind()
        for pipe in pair.both:
            torch.manual_seed(number)
            pipe.step(x, target=target)
        pair.compare()
    assert is_captured(pair, 3), str(pair.pipe)


class Narrow(Stage):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(x).float()


def test_autocast_within_a_block_that_is_off() -> None:
    pair = on_gpu(lambda: [Narrow() for _ in range(4)])
    for seed in range(7):
        with torch.autocast("cuda", enabled=False):
            pair.step(seed=seed)
    assert "captured, 4 replays" in str(pair.pipe), str(pair.pipe)
    pair = on_gpu(lambda: [Narrow() for _ in range(4)])
    train(pair)
    assert "side by side, 4 replays" in str(pair.pipe), str(pair.pipe)


@pytest.mark.parametrize("outside", [True, False])
def test_autocast(outside: bool) -> None:
    pair = on_gpu()
    if outside:
        with torch.autocast("cuda", torch.bfloat16):
            for seed in range(6):
                pair.step(seed=seed)
    else:
        optimizers = [torch.optim.SGD(pipe.parameters(), 0.05) for pipe in pair.both]
        for seed in range(7):
            with torch.autocast("cuda", torch.bfloat16):
                pair.step(seed=seed)
            for optimizer in optimizers:
                optimizer.step()
    assert "captured" in str(pair.pipe), str(pair.pipe)


def test_a_scaler() -> None:
    pair = on_gpu()
    scalers = [pipe.scaler(init_scale=2.0**10, growth_interval=2) for pipe in pair.both]
    optimizers = [torch.optim.SGD(pipe.parameters(), 0.05) for pipe in pair.both]
    x, target = torch.randn(2, 8, WIDTH).unbind()
    for number in range(9):
        losses = []
        for pipe, scaler, optimizer in zip(pair.both, scalers, optimizers, strict=True):
            with torch.autocast("cuda", torch.float16):
                losses.append(pipe.step(x, target=target, scaler=scaler).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert losses[0] == losses[1], number
    assert is_captured(pair, 6), str(pair.pipe)


class Waiting(Stage):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > -1e9 else x


def test_a_stage_that_waits_for_the_device_runs_eagerly() -> None:
    pair = on_gpu(lambda: [Stage(), Stage(), Waiting(), Stage()])
    for seed in range(3):
        pair.step(seed=seed)
    with pytest.warns(UserWarning, match=r"stage 2, micro-batch 0 \(2F0\): .*captur"):
        pair.step(seed=3)
    for seed in range(3):
        pair.step(seed=seed)
    assert torch.rand(3, device="cuda").sum().item() > 0
    other = on_gpu()
    train(other)
    assert is_captured(other, 4), str(other.pipe)


class Drawing(Stage):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if torch.rand(()).item() > 2 else x * self.linear.bias


class DrawingInPython(Stage):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() > 2 else x * self.linear.bias


@pytest.mark.parametrize("draws", [Drawing, DrawingInPython])
def test_a_stage_that_draws_elsewhere_runs_eagerly(draws: type[Stage]) -> None:
    pair = on_gpu(lambda: [draws(), Stage()], ranks=1)
    for seed in range(3):
        pair.step(seed=seed)
    with pytest.warns(UserWarning, match="random numbers are drawn on the CPU"):
        pair.step(seed=3)
    pair.step(seed=4)


class OnTheCPU(Stage):
    """Counts micro-batches on the CPU, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls.item()


KEEPING = {
    Remembering: "before",
    Averaging: "kept",
    Replacing: "seen",
    Counting: "calls",
    OnTheCPU: "calls",
}


@pytest.mark.parametrize("stage", KEEPING)
def test_a_stage_that_keeps_state_in_attributes_runs_eagerly(stage: type[Stage]) -> None:
    pair = on_gpu(lambda: [Stage(), stage(), Stage(), Stage()])
    with pytest.warns(UserWarning, match=f"stage 1: '{KEEPING[stage]}' is changed by a forward"):
        train(pair)
    assert not is_captured(pair, 4)


def test_buffers_and_tensors_that_are_changed_in_place() -> None:
    pair = on_gpu(lambda: [Moving("cuda") for _ in range(4)])
    train(pair)
    assert "captured, 4 replays" in str(pair.pipe), str(pair.pipe)
    for ours, theirs in zip(*(pipe.stages.values() for pipe in pair.both), strict=True):
        assert isinstance(ours, Moving)
        assert isinstance(theirs, Moving)
        assert torch.equal(ours.get_buffer("mean"), theirs.get_buffer("mean"))
        assert torch.equal(ours.total, theirs.total)


class Scaling(Stage):
    """Multiplies by a number on the CPU, which is part of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def test_a_tensor_on_the_cpu_that_the_user_changes() -> None:
    pair = on_gpu(lambda: [Scaling() for _ in range(4)])
    train(pair)
    for pipe in pair.both:
        stage = pipe.stages[1]
        assert isinstance(stage, Scaling)
        stage.factor.fill_(3.0)
    train(pair, 3)
    assert "captured" in str(pair.pipe), str(pair.pipe)


def test_a_gradient_that_is_kept_is_not_written_over() -> None:
    pair = on_gpu()
    train(pair)
    pair.step(seed=1)
    kept = [
        [p.grad.detach() for p in pipe.parameters() if p.grad is not None] for pipe in pair.both
    ]
    pair.each(tl.Pipeline.zero_grad)
    train(pair, 4)
    assert all(map(torch.equal, *kept))
    assert "captured" in str(pair.pipe), str(pair.pipe)


class Putting(Stage):
    def forward(self, x: Tensor) -> Tensor:
        tl.add_loss(0.1 * x.square().mean())
        tl.skip.put("x", x)
        return super().forward(x)


class Getting(Stage):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + tl.skip.get("x")


def test_skips_added_and_weighted_losses() -> None:
    pair = on_gpu(lambda: [Putting(), Stage(), Stage(), Getting()])
    for seed in range(6):
        pair.step(seed=seed, loss_weights=[1.0, 2.0 + seed, 3.0, 4.0])
    assert is_captured(pair, 3), str(pair.pipe)


def test_tied_weights() -> None:
    pipes = tied_pipelines("cuda")
    compare_tied(pipes, "cuda")
    assert re.search("captured.*, 4 replays", str(pipes[0])), str(pipes[0])


@pytest.mark.parametrize("number", range(4))
def test_changes_between_steps(number: int) -> None:
    pair = on_gpu(lambda: [Scaled("cuda") for _ in range(4)], ranks=1, loss_fn=Weighted().cuda())
    train(pair)
    chance = random.Random(number)
    for change in chance.sample(list(CHANGES.values()), 6):
        pair.each(change)
        train(pair, chance.choice([1, 2, 4]))
    for rows in (12, 8, 12, 8):
        pair.step(rows=rows)
    assert "captured" in str(pair.pipe), str(pair.pipe)


def test_evaluation() -> None:
    pair = on_gpu(lambda: [Stage(0.5) for _ in range(4)], ranks=1)
    for seed in range(6):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
        found = []
        for pipe in pair.both:
            torch.manual_seed(seed)
            found.append(pipe.eval(x))
        assert torch.equal(*found)
    assert "eval() with 8 rows in 4 micro-batches: captured, 3 replays" in str(pair.pipe)


def test_steps_under_nvtx_run_eagerly() -> None:
    pair = on_gpu()
    for seed in range(5):
        pair.step(seed=seed)
    with torch.autograd.profiler.emit_nvtx():
        pair.step(seed=5)
    assert is_captured(pair, 2), str(pair.pipe)


# The compiler's own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_compiled_stages(schedule: str) -> None:
    torch._dynamo.reset()
    count = 2 * SCHEDULES[schedule]
    pair = on_gpu(lambda: [Stage() for _ in range(count)], schedule=schedule, compile=True)
    for rows in (8, 12, 16):  # the third size may be dynamic
        train(pair, rows=rows)
    assert len(re.findall(r"captured.*, [34] replays", str(pair.pipe))) == 3, str(pair.pipe)
    assert f"compiled: {count} modules of 1 kind" in str(pair.pipe)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_experts_with_a_capacity(schedule: str) -> None:
    pair = on_gpu(lambda: [Mixed(2) for _ in range(4)], schedule=schedule)
    train(pair)
    assert is_captured(pair, 4), str(pair.pipe)


def test_experts_of_any_size_are_refused_by_name() -> None:
    pair = on_gpu(lambda: [Stage(), Mixed(None), Stage(), Stage()])
    for seed in range(3):
        pair.step(seed=seed)
    with pytest.warns(UserWarning, match=r"stage 1, .*captur.*, in 'experts' \(Experts, "):
        pair.step(seed=3)
    pair.step(seed=4)
