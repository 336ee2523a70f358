"""The watchdog: what it tells of steps that stand still, and that it stays out of the way."""

from __future__ import annotations

import gc
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import taktline as tl
from taktline.plan.action import Action, parse
from taktline.runtime import watchdog
from taktline.runtime.program import Instruction, Program
from taktline.runtime.watchdog import Watch
from taktline.transport import gloo, transport_of
from taktline.transport.distributed import Distributed
from tests.runtime.scenarios import CPU
from tests.workers import Workers, WorkersLost


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
    """Rank 0 takes two seconds for a forward; returns what this rank was told."""
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
    assert_told(
        first,
        rf"rank 0 of Schedule1F1B has made no progress for {seconds}\n  rank 0: {computes}\n"
        rf"  rank 1: .*",
    )
    assert_told(
        second,
        rf"rank 1 of Schedule1F1B has made no progress for {seconds}\n  rank 0: .*{computes}\n"
        rf"  rank 1: {waits}",
    )


def assert_told(records: list[str], pattern: str) -> None:
    """One of them is that; a busy machine may stand still elsewhere as well."""
    assert any(re.fullmatch(pattern, text) for text in records), records


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
    assert_told(
        first,
        r"rank 0 of Schedule1F1B has made no progress for .* seconds?\n"
        r"  rank 0: begins a step for .* seconds?: waits for other ranks\n"
        # The second if another test has used the same ranks.
        r"  rank 1: (has sent nothing yet|is not in a step)",
    )


def stuck(rank: int, group: Any, log: str) -> None:
    """A rank waits in a collective that cannot be ended, as in one of gloo's own deadlocks."""
    transport = transport_of(group)
    transport.exchange([])
    assert isinstance(transport, Distributed)
    if rank == 1:
        transport.raised(RuntimeError("out of luck"), "in 1F0")
        time.sleep(60)
    gloo.shut = lambda: None
    watchdog.STUCK_SECONDS = 0.2
    logging.getLogger("taktline").addHandler(logging.FileHandler(log))
    with watchdog.guarded(transport, "grad_norm()"):
        torch.distributed.barrier(group)


@pytest.mark.processes
def test_a_process_ends_that_cannot_leave_a_collective(workers: Workers, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(WorkersLost) as info:
        workers.run(stuck, str(log), ranks=2, timeout=30)
    assert info.value.died == {0: watchdog.STUCK}
    assert re.fullmatch(
        "rank 1 has raised RuntimeError in 1F0, and left the others behind: out of luck\n"
        r"rank 0 is in grad_norm\(\) for .* seconds?: waits for other ranks, and cannot leave a "
        "collective that waits for others: its process ends, with exit code 84\n",
        log.read_text(),
    )


class Ranks:
    """A transport of one rank, as far as a watch needs it."""

    rank = 0
    processes = (0,)
    verdict = None
    timeout = timedelta(seconds=60)

    def __init__(self) -> None:
        self.plane: Any = self
        self.news = self
        self.watched: tuple[Any, ...] = ()
        self.state: Any = None
        self.given_up: list[str] = []

    def report(self, processes: Any) -> str:
        return f"  rank 0: {self.state()[0]}"

    def stalled(self, processes: Any, awaited: Any, what: str) -> str:
        return what

    def give_up(self, verdict: str) -> None:
        self.given_up.append(verdict)


@pytest.fixture
def ranks() -> Any:
    return Ranks()


def test_a_step_is_reported_once_where_it_stands_still(ranks: Any) -> None:
    records = logged()
    watch = Watch("Schedule1F1B", ranks)
    watch._since, watch.seconds = 0.0, 3600.0
    with watch:  # the time counts from here
        assert ranks.watched == (watch,)
        assert ranks.state()[1]
        for watch.doing in ("begins a step", "ends a step"):
            watch.tick()
        assert not records
        watch.seconds = 0.0
        for _ in range(3):
            watch.tick()
    assert records == [
        "rank 0 of Schedule1F1B has made no progress for 0.0 seconds\n"
        "  rank 0: ends a step for 0.0 seconds: waits for other ranks"
    ]
    assert ranks.watched == ()
    assert ranks.state() == ("is not in a step", False)


def test_a_wait_that_outlasts_the_timeout_is_given_up(ranks: Any) -> None:
    watch = Watch("Schedule1F1B", ranks)
    ranks.timeout = timedelta(seconds=-10)
    with watch:
        watch.tick()
    assert ranks.given_up == ["other ranks"]


def test_a_watch_that_is_dropped_is_not_kept(ranks: Any) -> None:
    watch = Watch("Schedule1F1B", ranks)
    with watch:
        pass
    kept = ref(watch)
    del watch
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    ("action", "state"),
    [
        ("1F0", r"1F0 for 0\.\d seconds: computes"),
        ("1REDUCE_GRAD", r"1REDUCE_GRAD for 0\.\d seconds: waits for the replicas"),
    ],
)
def test_a_reduction_waits_and_a_forward_computes(ranks: Any, action: str, state: str) -> None:
    watch = Watch("Schedule1F1B", ranks)
    parsed = parse(action)
    assert isinstance(parsed, Action)
    run = Instruction(parsed, lambda: None, None, "the replicas")
    with watch, ThreadPoolExecutor(1) as other:
        watch.program = Program(cast(Any, None), [run])
        assert re.match(state, other.submit(ranks.state).result()[0])
