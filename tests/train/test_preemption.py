"""SIGTERM on any rank: all finish the update, call on_preempt, and end with one exit code."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import taktline as tl
from taktline.errors import ArgumentError
from taktline.train import preemption
from tests.settled import settle
from tests.workers import PRELOADED


class Slow(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        return super().forward(input)


def train(store: str, rank: int, world: int, copies: int, call: str, told: Connection) -> None:
    """Train for ever as one rank; tells when it runs, and what it saves."""
    settle()
    x, step = torch.ones(8, 4), 0

    def saved(pipe: tl.Pipeline) -> None:
        pipe.eval(x)  # what is done inside is no reason to end once more
        told.send(("saved", step, all(p.grad is None for p in pipe.parameters())))

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    pipe = tl.Pipeline(
        [Slow(4, 4), Slow(4, 4)],
        microbatches=4,
        loss_fn=nn.functional.mse_loss,
        ranks=2,
        on_preempt=saved,
        data_parallel="ddp" if copies > 1 else None,
    )
    for step in range(100_000):
        if call != "eval" or not step:
            pipe.train().step(x, target=2 * x)
            pipe.zero_grad()
        else:
            pipe.eval(x, target=2 * x)
        if step == 2:
            told.send("runs")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "copies", "signalled", "call"),
    [
        (2, 1, [0, 1], "step"),
        (2, 1, [1], "eval"),
        (4, 2, [3], "step"),
    ],
)
def test_all_ranks_end_after_the_same_step(
    world: int, copies: int, signalled: list[int], call: str, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store, pipes = str(tmp_path / "store"), [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=train, args=(store, rank, world, copies, call, told))
        for rank, (_, told) in enumerate(pipes)
    ]
    try:
        for process in processes:
            process.start()
        assert [heard.recv() for heard, _ in pipes] == ["runs"] * world
        for rank in signalled:
            pid = processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert [process.exitcode for process in processes] == [83] * world
    # Once on each, after the same step, when no gradients are left.
    found = [heard.recv() for heard, _ in pipes]
    assert set(found) == {("saved", found[0][1], True)}
    assert not any(heard.poll() for heard, _ in pipes)


X = torch.ones(4, 2)


def pipeline(**options: Any) -> tl.Pipeline:
    stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
    usual: dict[str, Any] = {"microbatches": 2, "loss_fn": nn.functional.mse_loss, "ranks": 2}
    return tl.Pipeline(stages, **(usual | options))


@pytest.fixture
def _restored() -> Iterator[None]:
    """Nothing is left behind."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    preemption._signals.heard = False


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def test_it_takes_effect_when_no_gradients_wait() -> None:
    called: list[tl.Pipeline] = []
    with pipeline(on_preempt=called.append) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters())
        terminate()
        pipe.step(X, target=X)
        pipe.step(X, target=X)  # adds to the gradients
        pipe.eval(X)
        assert not called
        optimizer.step()
        with pytest.raises(SystemExit) as end:
            pipe.step(X, target=X)
        assert end.value.code == tl.Pipeline.PREEMPTED == 83
        assert called == [pipe]
        assert pipe.schedules[0].steps == 2
        for _ in range(2):  # caught, it does not end training
            pipe.step(X, target=X)
            pipe.zero_grad()


@pytest.mark.usefixtures("_restored")
def test_a_signal_while_the_pipeline_is_built() -> None:
    def prepare(module: nn.Module, stage: int) -> nn.Module:
        terminate()
        return module

    called: list[tl.Pipeline] = []
    with pipeline(on_preempt=called.append, prepare=prepare) as pipe:
        with pytest.raises(SystemExit):
            pipe.eval(X)
        assert called == [pipe]


def test_an_error_in_on_preempt_is_raised() -> None:
    def fails(_: tl.Pipeline) -> None:
        raise OSError("disk full")

    with pipeline(on_preempt=fails) as pipe:
        terminate()
        with pytest.raises(OSError, match="disk full"):
            pipe.eval(X)


@pytest.mark.usefixtures("_restored")
def test_a_users_own_handler_is_called_as_well_and_comes_back() -> None:
    numbers: list[int] = []
    own = lambda number, _: numbers.append(number)  # noqa: E731
    signal.signal(signal.SIGTERM, own)
    pipe = pipeline(on_preempt=print)
    other = pipeline(on_preempt=print)
    terminate()
    assert numbers == [signal.SIGTERM]
    pipe.close()
    assert signal.getsignal(signal.SIGTERM) != own
    other.close()
    assert signal.getsignal(signal.SIGTERM) == own


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_pipeline_that_is_dropped_hears_nothing(elsewhere: bool) -> None:
    numbers: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    pipe = [pipeline(on_preempt=print)]
    if elsewhere:  # where a handler cannot be set
        thread = threading.Thread(target=pipe.clear)
        thread.start()
        thread.join()
    pipe.clear()
    gc.collect()
    terminate()
    assert numbers == [signal.SIGTERM]
    assert preemption._signals.heard is False


def test_it_must_be_called_and_made_in_the_main_thread() -> None:
    with pytest.raises(ArgumentError, match="on_preempt must be"):
        pipeline(on_preempt=3)
    errors: list[ValueError] = []

    def make() -> None:
        try:
            pipeline(on_preempt=print)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "signal only works in main thread" in str(errors[0])
