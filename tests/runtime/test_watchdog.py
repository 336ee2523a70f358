"""The watchdog: what it tells of steps that stand still, and that it stays out of the way."""

from __future__ import annotations

import gc
import logging
import re
import threading
import time
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional as F

import taktline as tl
from taktline.runtime.watchdog import Watch
from taktline.transport.board import Board
from tests.runtime.scenarios import CPU
from tests.workers import Workers


class Sleeps(nn.Linear):
    """Takes long for one micro-batch, if it is told so."""

    seconds = 0.0

    def forward(self, input: Tensor) -> Tensor:
        if self.seconds:
            seconds, self.seconds = self.seconds, 0.0
            time.sleep(seconds)
        return super().forward(input)


def logged() -> list[str]:
    """Everything that is told from now on."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("taktline")
    logger.handlers[:] = [handler]
    logger.propagate = False
    return records


def slow(rank: int, group: Any, call: str) -> list[str]:
    """Rank 0 takes two seconds for a forward; gives what this rank was told."""
    records = logged()
    module = Sleeps(4, 4)
    stage = tl.PipelineStage(module, rank, 2, CPU, group=group)
    schedule = tl.Schedule1F1B(stage, 4, F.mse_loss)
    schedule.stall_after = 0.4
    x = torch.ones(8, 4)
    schedule.step(x, target=x)
    schedule.eval(x)
    records.clear()  # a busy machine may well stand still before
    module.seconds = 2.0 if rank == 0 else 0.0
    getattr(schedule, call)(x, target=x)
    told = list(records)
    schedule.stall_after = None
    module.seconds = 1.0 if rank == 0 else 0.0
    records.clear()
    getattr(schedule, call)(x, target=x)
    assert not records
    return told


@pytest.mark.processes
@pytest.mark.parametrize("call", ["step", "eval"])
def test_each_rank_tells_where_all_of_them_are(workers: Workers, call: str) -> None:
    first, second = workers.run(slow, call, ranks=2)
    seconds = r"(\d+\.\d|\d+) seconds?"
    computes = rf"0F0 for {seconds}: computes, in test_watchdog\.py, line \d+ \(Sleeps\.forward\)"
    waits = rf"1F0 for {seconds}: waits for activations from rank 0 \(stage 0\)"
    assert re.fullmatch(
        rf"rank 0 of Schedule1F1B has stood still for {seconds}\n  rank 0: {computes}\n"
        rf"  rank 1: .*",
        first[0],
    )
    assert re.fullmatch(
        rf"rank 1 of Schedule1F1B has stood still for {seconds}\n  rank 1: {waits}\n"
        rf"  rank 0: .*{computes}",
        second[0],
    )


def missing(rank: int, group: Any) -> list[str]:
    """A rank that comes late to its first step."""
    records = logged()
    stage = tl.PipelineStage(nn.Linear(4, 4), rank, 2, CPU, group=group)
    schedule = tl.Schedule1F1B(stage, 4, F.mse_loss)
    schedule.stall_after = 0.4
    x = torch.ones(8, 4)
    if rank == 1:
        time.sleep(2.0)
    schedule.step(x, target=x)
    return records


@pytest.mark.processes
def test_a_rank_that_has_not_begun(workers: Workers) -> None:
    first, _ = workers.run(missing, ranks=2)
    assert re.fullmatch(
        r"rank 0 of Schedule1F1B has stood still for .* seconds?\n"
        r"  rank 0: waits for every rank to begin the step, for .* seconds?\n"
        # The second if another test has used the same ranks.
        r"  rank 1: (has not begun a step|is not in a step, for .* seconds?)",
        first[0],
    )


def test_a_step_that_goes_on_is_not_told_of() -> None:
    records = logged()
    watch = Watch("Schedule1F1B", 0, Board(HashStore(), 0, 1))
    watch.seconds = 0.2
    with watch:
        for number in range(12):
            watch.doing = f"does thing {number}"
            time.sleep(0.05)
    assert not records


def test_a_rank_says_when_its_step_is_over() -> None:
    board = Board(HashStore(), 0, 1)
    watch = Watch("Schedule1F1B", 0, board)
    watch.seconds = 0.2
    for _ in range(2):
        with watch:
            (word,) = board.read()
            assert word is not None
            assert word.busy
        deadline = time.monotonic() + 60
        while (word := board.read()[0]) is not None and word.busy:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert word is not None
        assert word.text == "is not in a step"


def test_a_short_limit_counts_while_the_watchdog_sleeps_for_a_long_one() -> None:
    records = logged()
    patient, hasty = (Watch(name, 0, Board(HashStore(), 0, 1)) for name in ("patient", "hasty"))
    patient.seconds, hasty.seconds = 3600.0, 0.2
    with patient:
        time.sleep(0.5)  # it sleeps by now, for a quarter of an hour
        with hasty:
            hasty.doing = "nothing"
            deadline = time.monotonic() + 60
            while not records and time.monotonic() < deadline:
                time.sleep(0.01)
    assert records[0].startswith("rank 0 of hasty has stood still for ")


def test_one_thread_looks_after_all_steps() -> None:
    watches = [Watch(name, 0, Board(HashStore(), 0, 1)) for name in ("one", "other")]
    with watches[0], watches[1]:
        dogs = [thread for thread in threading.enumerate() if thread.name == "taktline watchdog"]
        assert len(dogs) == 1
        assert dogs[0].daemon
    with watches[0]:
        assert dogs == [t for t in threading.enumerate() if t.name == "taktline watchdog"]


def test_a_watch_that_is_dropped_is_not_kept() -> None:
    watch = Watch("Schedule1F1B", 0, Board(HashStore(), 0, 1))
    with watch:
        pass
    kept = ref(watch)
    del watch
    gc.collect()
    assert kept() is None


def test_a_store_that_is_gone_does_not_disturb_a_step() -> None:
    watch = Watch("Schedule1F1B", 0, Board(HashStore(), 0, 1))
    watch.seconds = 0.1
    with watch:
        watch._board = Board(None, 0, 1)  # pyright: ignore[reportArgumentType]
        time.sleep(0.3)
    assert any(thread.name == "taktline watchdog" for thread in threading.enumerate())
