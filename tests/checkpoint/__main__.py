"""``python -m tests.checkpoint --kills 200 --seed 0`` kills ranks at random moments.

Each training of two ranks saves after every step, every other time in the background. It is killed
again and again, one rank or both, and goes on from the latest save. Every save must be readable,
and every loss that of a training that was left alone, to the last bit. Whoever has come to the end
before that does not count as killed.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

import taktline as tl
from taktline.checkpoint.saving import latest, saves
from tests.checkpoint.training import DropLM, Training, pipeline
from tests.settled import settle

RANKS = 2
STEPS = 10
PATIENCE = 60.0
"""Seconds in which a rank that was left behind must know of it."""
MEETING = 20.0
"""Seconds that torch waits for a rank that was killed before it has come."""


@dataclass
class Report:
    """What was seen."""

    kills: int = 0
    trainings: int = 0
    unreadable: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.unreadable or self.different or self.hung)

    def __str__(self) -> str:
        lines = [
            f"{self.kills} kills in {self.trainings} trainings: {len(self.unreadable)} unreadable "
            f"saves, {len(self.different)} other losses, {len(self.hung)} ranks that hung"
        ]
        return "\n".join([*lines, *self.unreadable, *self.different, *self.hung])


def kill_at_random(kills: int, seed: int, *, show: bool = False) -> Report:
    """Kill so often, at moments drawn from a seed."""
    draw, report = random.Random(seed), Report()
    with TemporaryDirectory() as folder:
        _prepare(Path(folder, "prepared"))
        calm = Path(folder, "calm")
        whole = _finish(calm, report)
        begins = _finish(calm, report)  # with nothing left to do
        expected = dict(_losses(calm))
        assert sorted(expected) == list(range(STEPS)), report
        while report.kills < kills:
            report.trainings += 1
            home = Path(folder, f"training-{report.trainings}")
            while report.kills < kills and not (home / "ended").exists():
                victims = draw.choice([[0], [1], [0, 1]])
                left = 1 - len(dict(_losses(home))) / (STEPS + 1)
                _strike(home, victims, draw.uniform(0, left * max(whole - begins, 0.5)), report)
                _inspect(home, expected, report)
            _finish(home, report)
            _inspect(home, expected, report)
            if show:
                print(report, flush=True)
    gc.unfreeze()
    return report


def _finish(home: Path, report: Report) -> float:
    """Let a training come to its end; on a busy machine ranks may not meet in time. Its seconds."""
    for _ in range(5):
        started = time.monotonic()
        _end(_start(home), report)
        if (home / "ended").exists():
            return time.monotonic() - started
    report.different.append(f"{home.name} has not come to its end")
    return 0.0


def _prepare(runs: Path) -> None:
    """Import what a training needs before ranks are forked, which share it then.

    Without a backward: in a build for GPUs that starts threads, and torch refuses one after a fork.
    """
    training = Training(pipeline(4, "zbv", ranks=2))
    training.save(runs)
    training.load(runs)
    gc.collect()
    gc.freeze()


def _strike(home: Path, victims: Sequence[int], after: float, report: Report) -> None:
    """Kill ranks so many seconds after they have met; before that, torch waits for who is lost."""
    for mark in home.glob("met-*"):
        mark.unlink()
    processes, started = _start(home), time.monotonic()
    while len(list(home.glob("met-*"))) < RANKS and time.monotonic() < started + PATIENCE:
        time.sleep(0.01)
    time.sleep(after)
    report.kills += not (home / "ended").exists()
    for rank in victims:
        processes[rank].kill()
    _end(processes, report)


def _start(home: Path) -> list[BaseProcess]:
    """Fork the ranks of a training: a fresh Python would take longer than all of it."""
    home.mkdir(exist_ok=True)
    store, context = home / f"store-{time.monotonic_ns()}", multiprocessing.get_context("fork")
    ranks = [context.Process(target=_work, args=(home, rank, store)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    return list(ranks)


def _work(home: Path, rank: int, store: Path) -> None:
    sys.stderr = open(home / f"stderr-{rank}", "a")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, sys.stderr)
    with suppress(tl.TaktlineError):  # of a rank that was left behind
        if _met(rank, store):
            _train(home, rank)


def _met(rank: int, store: Path) -> bool:
    """Meet the other ranks; if one is killed before, torch waits for it until it gives up."""
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=MEETING),
        )
    except Exception:
        return False
    return True


def _train(home: Path, rank: int) -> None:
    settle()
    training = Training(pipeline(4, "zbv", seed=3))
    (home / f"met-{rank}").touch()
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
    if training.pipe.is_first:
        (home / "ended").touch()


def _end(processes: Sequence[BaseProcess], report: Report) -> None:
    """Wait for all of them, and end those that do not end."""
    deadline = time.monotonic() + PATIENCE
    for rank, process in enumerate(processes):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            report.hung.append(f"rank {rank} was still there {PATIENCE:g} s after {report.kills}")
            os.kill(process.pid or 0, signal.SIGUSR1)  # says where it is
            time.sleep(1.0)
            process.kill()
            process.join()


def _inspect(home: Path, expected: dict[int, str], report: Report) -> None:
    for save in saves(home / "runs"):
        try:
            Training(DropLM()).load(save)
        except tl.TaktlineError as error:
            report.unreadable.append(f"{home.name}, after kill {report.kills}: {error}")
    for step, loss in _losses(home):
        if loss != expected[step]:
            report.different.append(f"{home.name}, step {step}: {loss}, not {expected[step]}")
    for rank in range(RANKS):
        unknown = home / f"stderr-{rank}"
        if unknown.exists() and re.search("Traceback|most recent call", unknown.read_text()):
            report.different.append(unknown.read_text()[-2000:])
            unknown.unlink()


def _losses(home: Path) -> list[tuple[int, str]]:
    try:
        text = (home / "losses").read_text()
    except FileNotFoundError:
        return []
    rows = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(int(step), loss) for step, loss in rows]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.exit(not kill_at_random(options.kills, options.seed, show=True).good)
