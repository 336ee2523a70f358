"""Ranks that are killed at random moments of training and saving, and start again.

Each training of two ranks saves after every step, every other time in the background. It is killed
again and again, one rank or both, and goes on from the latest save. Nothing may be there in half,
and every loss must be that of a training that was left alone, to the last bit.
"""

from __future__ import annotations

import faulthandler
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

import taktline as tl
from taktline.checkpoint.folder import is_whole, latest, saves
from tests.checkpoint.training import Training, pipeline

__all__ = ["Report", "kill_at_random"]

RANKS = 2
STEPS = 10
PATIENCE = 120.0
"""Seconds in which a rank that was left behind must know of it."""


@dataclass
class Report:
    """What was seen."""

    kills: int = 0
    trainings: int = 0
    unreadable: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """What ranks that were left behind have raised."""

    @property
    def good(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.unreadable or self.different or self.hung)

    def __str__(self) -> str:
        lines = [
            f"{self.kills} kills in {self.trainings} trainings: {len(self.unreadable)} unreadable "
            f"saves, {len(self.different)} other losses, {len(self.hung)} ranks that hung; "
            f"{len(self.told)} ranks left behind have said why"
        ]
        return "\n".join([*lines, *self.unreadable, *self.different, *self.hung])


def kill_at_random(kills: int, seed: int, *, show: bool = False) -> Report:
    """Kill so often, at moments drawn from a seed."""
    draw, report = random.Random(seed), Report()
    with TemporaryDirectory() as folder:
        calm = Path(folder, "calm")
        started = time.monotonic()
        _end(_start(calm), report)
        lasts = time.monotonic() - started
        expected = _losses(calm)
        assert sorted(expected) == list(range(STEPS)), "the calm training ends"
        while report.kills < kills:
            report.trainings += 1
            home = Path(folder, f"training-{report.trainings}")
            while report.kills < kills and len(_losses(home)) < STEPS:
                victims = draw.choice([[0], [1], [0, 1]])
                _strike(home, victims, draw.uniform(0, lasts), report)
                _inspect(home, expected, report)
            _end(_start(home), report)
            _inspect(home, expected, report)
            if len(_losses(home)) < STEPS:
                report.different.append(f"{home.name} has not come to its end")
            if show:
                print(report, flush=True)
    return report


def _strike(home: Path, victims: Sequence[int], after: float, report: Report) -> None:
    for mark in home.glob("met-*"):
        mark.unlink()
    processes = _start(home)
    time.sleep(after)
    # Before they have met, a rank waits in torch for as long as that does.
    met = len(list(home.glob("met-*"))) == RANKS
    for rank in victims if met else range(RANKS):
        os.kill(processes[rank], signal.SIGKILL)
    report.kills += 1
    _end(processes, report)


def _start(home: Path) -> list[int]:
    """Fork the ranks of a training: a fresh Python would take longer than all of it."""
    home.mkdir(exist_ok=True)
    store = home / f"store-{time.monotonic_ns()}"
    processes: list[int] = []
    for rank in range(RANKS):
        process = os.fork()
        if not process:
            code = 1
            try:
                sys.stderr = open(home / f"stderr-{rank}", "a")  # noqa: SIM115
                faulthandler.register(signal.SIGUSR1, sys.stderr)
                if _met(rank, store):
                    (home / f"met-{rank}").touch()
                    _train(home)
                code = 0
            except tl.TaktlineError as error:
                (home / f"told-{rank}").write_text(f"rank {rank}: {type(error).__name__}: {error}")
                code = 3
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        processes.append(process)
    return processes


def _met(rank: int, store: Path) -> bool:
    """Meet the other ranks; if one is killed before, torch waits for it until it gives up."""
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=PATIENCE / 3),
        )
    except Exception:
        return False
    return True


def _train(home: Path) -> None:
    torch.set_num_threads(1)
    training = Training(pipeline(4, "zbv", seed=3))
    assert isinstance(training.pipe, tl.Pipeline)
    runs = home / "runs"
    step = training.load(runs).step if latest(runs) else 0
    while step < STEPS:
        loss = training.step()
        if training.pipe.is_first:
            with open(home / "losses", "a") as file:
                file.write(f"{step} {loss.hex()}\n")
        step += 1
        training.save(runs, keep=2, async_save=step % 2 == 0, extra={"step": step})
    training.save(runs, keep=2)


def _end(processes: Sequence[int], report: Report) -> None:
    """Wait for all of them, and end those that do not end."""
    waiting, deadline = dict(enumerate(processes)), time.monotonic() + PATIENCE
    while waiting and time.monotonic() < deadline:
        for rank, process in list(waiting.items()):
            if os.waitpid(process, os.WNOHANG)[0]:
                del waiting[rank]
        time.sleep(0.01)
    for rank, process in waiting.items():
        report.hung.append(f"rank {rank} was still there {PATIENCE:g} s after kill {report.kills}")
        os.kill(process, signal.SIGUSR1)  # says where it is
        time.sleep(1.0)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _inspect(home: Path, expected: dict[int, str], report: Report) -> None:
    for save in saves(home / "runs"):
        if not is_whole(save):
            report.unreadable.append(f"{home.name}/{save.name} after kill {report.kills}")
    for step, loss in _lines(home):
        if loss != expected[step]:
            report.different.append(f"{home.name}, step {step}: {loss}, not {expected[step]}")
    for rank in range(RANKS):
        told = home / f"told-{rank}"
        if told.exists():
            report.told.append(told.read_text())
            told.unlink()
        unknown = home / f"stderr-{rank}"
        if unknown.exists() and re.search("Traceback|most recent call", unknown.read_text()):
            report.different.append(unknown.read_text()[-2000:])
            unknown.unlink()


def _losses(home: Path) -> dict[int, str]:
    return dict(_lines(home))


def _lines(home: Path) -> list[tuple[int, str]]:
    try:
        text = (home / "losses").read_text()
    except FileNotFoundError:
        return []
    rows = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(int(step), loss) for step, loss in rows]
