"""Ranks that die or stand still, in every phase of a step: the others say so, and do not hang."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import taktline as tl
from tests.settled import settle
from tests.workers import PRELOADED

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
MICROBATCHES = 6
PHASES = {
    # The call, and which forward (+) or backward (-) of the step the fault comes in, from 1.
    "warm-up": ("step", 1),
    "steady": ("step", 4),
    "cool-down": ("step", -MICROBATCHES),
    "eval": ("eval", 3),
}


@dataclass
class Answer:
    """What a rank that is left has seen."""

    kind: str
    text: str
    peer: int | None
    log: list[str]


class _Strikes(torch.autograd.Function):
    """Nothing, but for what happens in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Falters) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.layer.backwards += 1
        ctx.layer.strike(-ctx.layer.backwards)
        return gradients[0], None


class Falters(nn.Module):
    """A layer whose process gets a signal in one of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forwards = self.backwards = 0
        self.due: tuple[int, int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self.strike(self.forwards)
        return _Strikes.apply(self.linear(x), self)

    def strike(self, call: int) -> None:
        if self.due is not None and self.due[0] == call:
            os.kill(os.getpid(), self.due[1])


def _rank(
    rank: int, ranks: int, store: Path, victim: int, phase: str, sign: int, answer: Connection
) -> None:
    settle()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("taktline").addHandler(handler)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=8),
    )
    layer = Falters()
    schedule = tl.Schedule1F1B(tl.PipelineStage(layer, rank, ranks, CPU), MICROBATCHES, F.mse_loss)
    schedule.stall_after = 1.0
    x = torch.ones(12, 4)
    for call in ("step", "eval", "step"):
        getattr(schedule, call)(x, target=x)
    call, number = PHASES[phase]
    layer.forwards = layer.backwards = 0
    layer.due = (number, sign) if rank == victim else None
    records.clear()  # a busy machine may well stand still before
    try:
        getattr(schedule, call)(x, target=x)
    except tl.TaktlineError as error:
        peer = getattr(error, "peer", None)
        answer.send(Answer(type(error).__name__, str(error), peer, records))
    else:
        answer.send(Answer("", "", None, records))
    with suppress(EOFError):
        answer.recv()  # stays alive: what the others learn, they learn from what this rank does


@pytest.fixture
def strike(tmp_path: Path) -> Iterator[Any]:
    """Runs ranks of which one gets a signal; returns the answers of the others."""
    # Forked from a process that has imported torch, and has not used it yet.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes: list[Any] = []

    def run(ranks: int, victim: int, phase: str, sign: int) -> dict[int, Answer]:
        ends: dict[Connection, int] = {}
        for rank in range(ranks):
            here, there = context.Pipe()
            arguments = (rank, ranks, tmp_path / "store", victim, phase, sign, there)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            there.close()
            processes.append(process)
            if rank != victim:
                ends[here] = rank
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + 60
        while len(answers) < len(ends):
            waiting = [end for end, rank in ends.items() if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            assert ready, f"rank {[ends[end] for end in waiting]} gave no answer"
            for end in ready:
                assert isinstance(end, Connection)
                answers[ends[end]] = end.recv()
        return answers

    yield run
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (3, 2), (6, 3)])
def test_a_rank_that_is_killed(strike: Any, phase: str, ranks: int, victim: int) -> None:
    answers = strike(ranks, victim, phase, signal.SIGKILL)
    assert len(answers) == ranks - 1
    for answer in answers.values():
        assert (answer.kind, answer.peer) == ("LostRankError", victim), answer.text
        assert answer.text == (
            f"rank {victim} is lost: its process has ended, or cannot be reached. Look at its "
            "output; restart all ranks"
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_stands_still(strike: Any, phase: str) -> None:
    answers = strike(2, 1, phase, signal.SIGSTOP)
    (answer,) = answers.values()
    # First a report, while there is hope; then, when time is up, the error with another one.
    # On a busy machine there may be more reports: on the way to where the rank stands still.
    *_, told = [text for text in answer.log if "has made no progress" in text]
    assert answer.kind == "StallError"
    assert answer.peer == 1
    first, *report = answer.text.splitlines()
    assert first.startswith("rank 1 has not answered in time (rank 0 waits for ")
    assert told.startswith("rank 0 of Schedule1F1B has made no progress for ")
    for lines in (told.splitlines()[1:], report):
        assert "waits for" in lines[0]
        assert lines[0].startswith("  rank 0: ")
        assert lines[1].startswith("  rank 1: ")
    # By then the other rank has been silent for a while.
    assert report[1].startswith("  rank 1: silent for ")
    assert "(stopped, or cut off); then: " in report[1]


ENDS_EARLY = """
import sys
from datetime import timedelta

import torch.distributed as dist
from torch import nn

import taktline as tl

rank, victim, where, how = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
dist.init_process_group(
    "gloo", init_method=where, rank=rank, world_size=3, timeout=timedelta(seconds=300)
)
if rank == victim:
    sys.exit("no model" if how == "fails" else 0)
if rank == 1 and how == "late":
    input()
try:
    tl.Pipeline(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), loss_fn=nn.MSELoss())
except tl.TaktlineError as error:
    print(type(error).__name__, error.peer)
"""


@pytest.mark.parametrize(
    ("victim", "hosts", "how"),
    [(2, False, "ends"), (2, False, "late"), (1, True, "fails"), (0, True, "ends")],
)
def test_a_rank_that_ends_before_its_pipeline(
    tmp_path: Path, victim: int, hosts: bool, how: str
) -> None:
    """``hosts``: whether rank 0 keeps the store, which ends with it.

    A rank that comes when rank 0 has left, too, can then hear of that only. ``late``: rank 1 comes
    that late.
    """
    where = f"file://{tmp_path}/store"
    if hosts:
        with socket.create_server(("localhost", 0)) as free:
            where = f"tcp://localhost:{free.getsockname()[1]}"
    words = [sys.executable, "-c", ENDS_EARLY]
    told = [str(victim), where, how]
    ranks = [
        subprocess.Popen([*words, str(r), *told], stdin=PIPE, stdout=PIPE, text=True)
        for r in range(3)
    ]
    try:
        for rank in sorted({0, 1, 2} - {victim}):
            told = {victim, 0} if hosts and rank else {victim}
            answer = ranks[rank].communicate("go on\n", timeout=120)[0]
            assert answer in [f"LostRankError {each}\n" for each in told]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
