"""Pipelines and threads: nothing of one is left in another, and one step runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline.errors import StageError, UseError
from taktline.runtime.stage_actions import seeded
from taktline.side_values import SideValues, side_values
from tests.workers import Workers

X, Y = torch.ones(4, 3), torch.zeros(4, 3)


def in_thread(fn: Callable[[], Any]) -> Any:
    """What a function returns, or raises, on a thread of its own."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(fn())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, name="another")
    thread.start()
    thread.join(timeout=60)
    return results[0]


def test_side_values_that_overlap_on_two_threads_leave_nothing_behind() -> None:
    before, entered, left = side_values(), threading.Event(), threading.Event()

    def other() -> None:
        with SideValues(1, {}):
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=other)
    with SideValues(0, {}):
        thread.start()
        entered.wait(60)
    left.set()
    thread.join()
    assert side_values() is before
    with tl.collect_losses() as losses:
        assert in_thread(lambda: tl.add_loss(torch.tensor(1.0))) is None
    assert losses == []


def test_a_seed_leaves_the_default_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did not: a seeded forward on a GPU made tensors there that name no device."""
    seeds: list[int] = []
    fake = SimpleNamespace(device=nullcontext, manual_seed=seeds.append)
    monkeypatch.setattr(torch, "get_device_module", lambda _: fake)
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: nullcontext())
    with seeded((1, 2, 3, 4), torch.device("cuda")):
        assert torch.get_default_device() == torch.device("cpu")
        assert seeds == [torch.initial_seed()]


def test_a_plain_model_beside_a_pipeline_adds_nothing_to_it() -> None:
    def add_beside(module: nn.Module, *_: object) -> None:
        in_thread(lambda: tl.add_loss(torch.tensor(1.0)))
        tl.add_loss(torch.tensor(2.0))

    stage = nn.Linear(3, 3)
    stage.register_forward_hook(add_beside)
    pipe = pipeline(stage, microbatches=1)
    added: list[Tensor] = []
    pipe.step(X, target=Y, aux_losses=added)
    assert added == [torch.tensor(2.0)]


def test_losses_are_collected_and_values_go_their_own_way() -> None:
    def block(x: Tensor) -> Tensor:
        tl.add_loss(x.sum())
        return x * tl.skip.get("x")

    x = torch.ones(3, requires_grad=True)
    with tl.collect_losses() as losses:
        tl.skip.put("x", x)
        y = checkpoint(block, x, use_reentrant=False)
    assert len(losses) == 1
    y.sum().backward()  # runs the block again, which gets the same value
    assert len(losses) == 1
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # pyright: ignore


class Calls(nn.Linear):
    """Calls something in its forward."""

    def __init__(self, fn: Callable[[], Any] | None = None) -> None:
        super().__init__(3, 3)
        self.fn = fn

    def forward(self, input: Tensor) -> Tensor:
        if self.fn is not None:
            self.fn()
        return super().forward(input)


def pipeline(*stages: nn.Module, **options: Any) -> tl.Pipeline:
    usual = {"microbatches": 2, "loss_fn": nn.functional.mse_loss, "ranks": len(stages)}
    return tl.Pipeline(list(stages), schedule="1f1b", **(usual | options))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_thread_is_refused(ranks: int) -> None:
    stages = [Calls() for _ in range(ranks)]
    pipe = pipeline(*stages)
    expected = pipe.step(X, target=Y)
    found: list[Any] = []
    calls = [
        lambda: pipe.step(X, target=Y),
        lambda: pipe.eval(X),
        lambda: pipe.schedules[0].eval(X, return_outputs=False),
    ]
    stages[0].fn = lambda: found.extend(map(in_thread, calls)) if not found else None
    assert pipe.step(X, target=Y) == expected
    assert all(isinstance(error, UseError) for error in found)
    assert "this pipeline is running in thread 'MainThread', and was called again from thread" in (
        str(found[0])
    )
    assert all(stage.training for stage in stages)
    stages[0].fn = None
    assert in_thread(lambda: pipe.step(X, target=Y)) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_within_a_step_is_refused(ranks: int) -> None:
    stages = [Calls() for _ in range(ranks)]
    pipe = pipeline(*stages)
    expected = pipe.step(X, target=Y)
    stages[0].fn = lambda: pipe.step(X, target=Y)
    with pytest.raises(
        StageError, match=r"this pipeline is running in thread .* outside of a stage's forward"
    ):
        pipe.step(X, target=Y)
    stages[0].fn = None
    assert pipe.step(X, target=Y) == expected


def _within(rank: int, group: Any) -> list[str]:
    module = Calls()
    stage = tl.PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    schedule = tl.ScheduleGPipe(stage, 2, nn.functional.mse_loss)
    schedule.step(*[X][rank:], target=Y)
    if rank == 0:
        module.fn = lambda: schedule.step(X)
    texts = []
    try:
        schedule.step(*[X][rank:], target=Y)
    except StageError as error:
        texts.append(str(error))
    module.fn = None
    schedule.step(*[X][rank:], target=Y)
    return texts


@pytest.mark.processes
def test_a_step_within_a_step_is_refused_in_processes(workers: Workers) -> None:
    for texts in workers.run(_within):
        assert len(texts) == 1
        assert "call it from outside of a stage's forward, a loss function or a hook" in texts[0]
