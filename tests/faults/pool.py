"""The processes of a job: started, told what to do, listened to, and ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from tests.faults.case import TIMEOUT, Case
from tests.faults.messages import Answer, Place, Struck
from tests.faults.worker import keep_store, work
from tests.workers import PRELOADED

START_SECONDS = 60.0
LEAVE_SECONDS = 10.0
PATIENCE = 2 * TIMEOUT + 2
"""How long after the detection a rank that knows nothing is waited for; then it hangs."""


@dataclass
class Report:
    """What was seen of one fault."""

    struck: Struck | None
    answers: dict[int, Answer]
    awoken: dict[int, Answer] = field(default_factory=dict)
    """Of a rank that was stopped, once it runs again."""
    resumed: dict[int, Answer] = field(default_factory=dict)
    """Of the step with which training goes on."""
    healthy: dict[int, Answer] = field(default_factory=dict)
    """Of a step before."""
    silent: list[int] = field(default_factory=list)
    """The ranks that hang."""
    left: list[int] = field(default_factory=list)
    """The ranks whose processes did not end when they were told to."""


class Job:
    """Processes that meet, with those that a fault ends among them.

    Forked from one that has imported torch, with what DDP and FSDP import when they are used, and
    has not used it yet: a new job takes a second, so every fault can have its own.
    """

    def __init__(
        self, case: Case, places: Sequence[Place] | None = None, *, quiet: bool = True
    ) -> None:
        self.case = case
        self.healthy: dict[int, Answer] = {}
        self.struck: Struck | None = None
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOADED, "tests.faults.worker"])
        self._places = places or [Place(quiet=quiet)] * case.ranks
        self._processes: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}
        self._store: Any = None
        self._store_pipe: Connection | None = None

    def __enter__(self) -> Self:
        try:
            port, first = 0, self._places[0]
            if self.case.what.store != "rank 0":
                self._store, self._store_pipe = self._start(keep_store, first)
                port = self._heard(self._store_pipe)
            for rank, place in enumerate(self._places):
                target = (self.case, rank, replace(place, host=first.host, port=port))
                self._processes[rank], self._pipes[rank] = self._start(work, *target)
                port = port or self._heard(self._pipes[rank])
            for rank, pipe in self._pipes.items():
                if rank or self._store:
                    self._heard(pipe)
            self.ask("meet")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left, whatever it does."""
        for process in (*self._processes.values(), self._store):
            if process is not None:
                process.kill()
                process.join()
        for pipe in (*self._pipes.values(), self._store_pipe):
            if pipe is not None:
                pipe.close()

    def build(self) -> None:
        """Make the pipeline on every rank."""
        self.healthy = self.ask("build")

    def tell(self, *order: Any) -> None:
        """Give an order to every rank without waiting."""
        for pipe in self._pipes.values():
            with suppress(OSError):  # gone
                pipe.send(order)

    def ask(self, *order: Any) -> dict[int, Answer]:
        """Give an order that every rank must be able to follow."""
        self.tell(*order)
        answers = self.listen(self._pipes, START_SECONDS)
        wrong = {rank: a.text for rank, a in answers.items() if a.kind}
        if wrong or len(answers) < len(self._pipes):
            silent = sorted(set(self._pipes) - set(answers))
            raise RuntimeError(f"cannot {order[0]}: {wrong}, no answer from {silent}")
        return answers

    def listen(self, ranks: Collection[int], seconds: float) -> dict[int, Answer]:
        """The answers of ranks, as far as they come; notes when the fault came."""
        answers: dict[int, Answer] = {}
        waiting = {self._pipes[rank]: rank for rank in ranks}
        deadline = time.monotonic() + seconds
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                try:
                    word = pipe.recv()
                except (EOFError, OSError):
                    del waiting[pipe]
                    continue
                if isinstance(word, Struck):
                    self.struck = word
                else:
                    answers[waiting.pop(pipe)] = word
        return answers

    def send_signal(self, number: int, ranks: Collection[int]) -> None:
        """Send a signal to some ranks."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, number)

    def strike_store(self, how: str) -> None:
        """End or stop the process that keeps the store."""
        os.kill(self._store.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "killed":
            self._store.join()

    def go_on(self, answers: Sequence[Answer]) -> dict[int, Answer]:
        """Run the next step the way the errors say, if they agree on one."""
        hows = {answer.recoverable for answer in answers if answer.ours}
        if len(hows) != 1 or not hows <= {"step", "reconnect"}:
            return {}
        self.tell(*hows)
        return self.listen(self._pipes, PATIENCE)

    def leave(self) -> list[int]:
        """Tell every rank to end; returns those that did not."""
        for pipe in self._pipes.values():
            with suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + LEAVE_SECONDS
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        return [rank for rank, process in self._processes.items() if process.is_alive()]

    def _start(self, target: Any, *arguments: Any) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=target, args=(*arguments, there), daemon=True)
        process.start()
        there.close()  # with this end open here too, it would never read as gone
        return process, here

    def _heard(self, pipe: Connection) -> Any:
        if not pipe.poll(START_SECONDS):
            raise RuntimeError("a process does not come up")
        return pipe.recv()


@contextmanager
def started(case: Case, *, quiet: bool = True) -> Iterator[Job]:
    """A job whose pipeline works, if the case does not build it itself.

    Its processes have the timeout of the fault to connect in, which a busy machine may exceed:
    then there was no fault yet, and they are started once more.
    """
    with ExitStack() as stack:
        try:
            job = _built(case, stack, quiet)
        except RuntimeError:
            stack.close()
            job = _built(case, stack, quiet)
        yield job


def _built(case: Case, stack: ExitStack, quiet: bool) -> Job:
    job = stack.enter_context(Job(case, quiet=quiet))
    if case.when.call != "build":
        job.build()
    return job


def trial(job: Job, case: Case) -> Report:
    """Let a fault come over a job, and see whether it can go on."""
    fault = case.what
    if fault.store in ("killed", "stopped"):
        job.strike_store(fault.store)
    job.struck = None if fault.act else Struck(time.monotonic(), None)
    job.tell("face", case)
    stopped = fault.act == "stop"
    asked = [
        rank for rank in range(case.ranks) if rank != case.victim or (fault.answers and not stopped)
    ]
    answers = job.listen(asked, case.when.late + fault.detection + PATIENCE)
    if case.victim not in asked:
        job.listen([case.victim], 0.0)  # it has only said when
    report = Report(job.struck, answers, healthy=job.healthy)
    report.silent = [rank for rank in asked if rank not in answers]
    if report.silent:
        job.send_signal(signal.SIGUSR1, report.silent)  # where they are, on stderr
        time.sleep(0.2)
        return report
    if stopped:
        job.send_signal(signal.SIGCONT, [case.victim])
        report.awoken = job.listen([case.victim], PATIENCE)
    if fault.goes_on:
        report.resumed = job.go_on([*answers.values(), *report.awoken.values()])
    return report
