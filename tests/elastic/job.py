"""Starts the ranks of a job, and hears what they have seen."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.elastic.worker import Job, Told, work
from tests.workers import PRELOADED

SECONDS = 180.0


@dataclass
class Outcome:
    """What was seen of a job."""

    told: dict[int, Told] = field(default_factory=dict)
    """By rank; those that are lost have told nothing."""
    struck: dict[int, float] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    """The ranks that hang."""
    codes: dict[int, int | None] = field(default_factory=dict)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run(job: Job, seconds: float = SECONDS) -> Outcome:
    """Run a job until all of its ranks have ended, or are stopped."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "tests.elastic.worker"])
    port, outcome = free_port(), Outcome()
    processes: dict[int, Any] = {}
    pipes: dict[Connection, int] = {}
    for rank in range(job.ranks):
        here, there = context.Pipe()
        processes[rank] = context.Process(target=work, args=(rank, job, port, there), daemon=True)
        processes[rank].start()
        there.close()
        pipes[here] = rank
    stopped = {strike.rank for strike in job.strikes if strike.how == "stop"}
    deadline = time.monotonic() + seconds
    try:
        while set(pipes.values()) - (stopped & outcome.struck.keys()):
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                outcome.silent = sorted(set(pipes.values()) - stopped)
                break
            for pipe in [each for each in pipes if each in ready]:
                try:
                    what, found = pipe.recv()
                except (EOFError, OSError):
                    del pipes[pipe]
                    continue
                if what == "told":
                    outcome.told[pipes[pipe]] = pickle.loads(found)
                else:
                    outcome.struck[pipes[pipe]] = found
    finally:
        for rank, process in processes.items():
            process.join(0 if rank in outcome.silent or rank in stopped else 10)
            outcome.codes[rank] = process.exitcode
            process.kill()
            process.join()
    return outcome
