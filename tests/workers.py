"""Worker processes for the tests that communicate, started once and used by many tests.

A test hands over a function of its module; every worker runs it as ``fn(rank, group, *args)``, and
the results come back in the order of the ranks::

    def _sum(rank: int, group: dist.ProcessGroup, start: int) -> float:
        total = torch.tensor(float(start + rank))
        dist.all_reduce(total, group=group)
        return total.item()


    @pytest.mark.processes
    def test_sum(workers: Workers) -> None:
        assert workers.run(_sum, 10, ranks=3) == [33.0, 33.0, 33.0]

The workers meet over gloo. Inside the function warnings are errors, as in every test, and torch's
random numbers begin anew with each call. After a failure, or where ranks have left each other
behind, the workers meet again in new groups, so that nothing of it reaches the next test.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from taktline.train.ranks import forget_meshes
from taktline.transport.exit_hooks import planes
from tests.settled import settle

PRELOADED = [
    "torch.distributed.fsdp",
    "torch._dynamo",
    "taktline.train",
    "taktline.cli.app",
    # Only some tests need these; but then each worker of each pool would load them by itself.
    "hypothesis",
    "pytest",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
    __name__,
]
"""Whatever a process would import first: loading it takes longer than most tests."""

# For what the pool does on its own account. Generous: on a busy machine torch loads slowly.
MEETING_SECONDS = 300.0
AGAIN_SECONDS = 60.0
"""The same for processes that have met before, and may be blocked by what a failure left."""
LEAVING_SECONDS = 10.0
STACK_SECONDS = 1.0

_GROUPS = 1000
"""So many groups a call makes at most."""


class WorkersFailed(Exception):
    """The function raised on some ranks; ``errors`` holds what it raised, by rank."""

    def __init__(self, errors: Mapping[int, BaseException], tracebacks: Mapping[int, str]) -> None:
        self.errors = dict(errors)
        super().__init__(f"raised on {_ranks(sorted(errors))}\n{_by_rank(tracebacks)}")


class WorkersLost(Exception):
    """Some ranks gave no answer, so the pool was ended; the next run starts a new one.

    ``died`` holds the exit codes of the ranks whose process ended, and ``silent`` the ranks that
    were still busy when the wait was over.
    """

    def __init__(self, reason: str, died: Mapping[int, int | None], silent: Sequence[int]) -> None:
        self.died = dict(died)
        self.silent = list(silent)
        super().__init__(reason)


@dataclass(frozen=True)
class _Call:
    """Run a function, pickled with its arguments, in the group of the first ``ranks``."""

    payload: bytes
    ranks: int
    number: int
    """Of all calls; the same for all of them."""


@dataclass(frozen=True)
class _Answer:
    """A pickled result, or a pickled exception and its traceback."""

    payload: bytes
    traceback: str | None = None
    left: bool = False
    """Whether ranks have left each other behind, in any of the groups."""

    def load(self) -> Any:
        return pickle.loads(self.payload)


_Answers: TypeAlias = dict[int, _Answer]


class Workers:
    """A pool of processes, started at the first run; ``group_timeout`` ends a wait in a group."""

    def __init__(self, size: int = 4, group_timeout: float = 60.0) -> None:
        self.size = size
        self.group_timeout = group_timeout
        self._numbers = count(1)  # of meetings and calls
        self._clean = True
        """Whether the groups hold nothing of an earlier failure."""
        self._folder: Path | None = None
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def run(
        self, fn: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 120.0
    ) -> list[Any]:
        """What ``fn(rank, group, *args)`` returns on the workers ``0 .. ranks - 1``."""
        return _results(self._ask(fn, args, ranks, timeout))

    def outcomes(
        self, fn: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 120.0
    ) -> list[Any]:
        """Like :meth:`run`, but an exception stands in the place of the result."""
        answers = self._ask(fn, args, ranks, timeout)
        return [answers[rank].load() for rank in range(ranks)]

    def stop(self) -> None:
        """End the processes; another run would start new ones."""
        for connection in self._connections:
            # Closing is the sign to leave, and it also reaches workers whose parent was killed.
            connection.close()
        deadline = time.monotonic() + LEAVING_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _ask(
        self, fn: Callable[..., Any], args: tuple[Any, ...], ranks: int, timeout: float
    ) -> _Answers:
        if not 1 <= ranks <= self.size:
            raise ValueError(f"ranks must be from 1 to {self.size}, not {ranks}")
        # Not by the connection: it would send tensors as shared memory, which ends with a process.
        call = _Call(pickle.dumps((fn, args)), ranks, next(self._numbers))
        try:
            self._meet()
            answers = self._answers(call, ranks, timeout)
        except BaseException:
            # Ctrl-C as well: a worker that is still busy would answer the next question with this.
            self._kill()
            raise
        self._clean = not any(each.traceback or each.left for each in answers.values())
        return answers

    def _meet(self) -> None:
        """See that there are processes, and groups that hold nothing of an earlier failure."""
        if self._processes and not self._clean:
            try:
                self._make_groups(AGAIN_SECONDS)
            except (WorkersLost, WorkersFailed):
                # Work that a failure left behind may block; only the end of its process helps.
                self._kill()
        if not self._processes:
            self._start()
            self._make_groups(MEETING_SECONDS)
        self._clean = True

    def _start(self) -> None:
        self._folder = Path(mkdtemp(prefix="taktline-workers-"))
        # Forked from a process that has imported torch, and has not used it yet.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(self.size):
            here, there = context.Pipe()
            arguments = (rank, self.size, self.group_timeout, self._file("stack", rank), there)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            # With this end open here too, a worker that dies would never read as gone.
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def _file(self, name: str, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}-{number}"

    def _make_groups(self, seconds: float) -> None:
        """Give all workers new groups, by a file that no earlier meeting has used."""
        store = self._file("store", next(self._numbers))
        _results(self._answers(store, self.size, seconds))

    def _answers(self, request: Path | _Call, ranks: int, timeout: float) -> _Answers:
        """What the first workers answer to a call, or to a file to meet by."""
        waiting = {self._connections[rank]: rank for rank in range(ranks)}
        for connection in waiting:
            # Whoever cannot be reached has died, and the read below says so.
            with suppress(OSError):
                connection.send(request)
        answers: _Answers = {}
        died: list[int] = []
        deadline = time.monotonic() + timeout
        while waiting and not died:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in [one for one in waiting if one in ready]:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    died.append(rank)
        if died or waiting:
            raise self._lost(died, sorted(waiting.values()), answers, timeout)
        return answers

    def _kill(self) -> None:
        """End the workers, whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        if self._folder is not None:
            shutil.rmtree(self._folder)
        self._folder, self._processes, self._connections = None, [], []

    def _lost(
        self, died: Sequence[int], silent: Sequence[int], answers: _Answers, timeout: float
    ) -> WorkersLost:
        """The error for ranks without an answer, with all that helps to find the cause."""
        codes: dict[int, int | None] = {}
        for rank in died:
            # The pipe closes a moment before the process is gone.
            self._processes[rank].join(LEAVING_SECONDS)
            codes[rank] = self._processes[rank].exitcode
        lines = [f"rank {rank} died with exit code {code}" for rank, code in codes.items()]
        if silent:
            limit = "until then" if died else f"within {timeout:g} s"
            lines.append(f"no answer {limit} from {_ranks(silent)}")
        lines.append(_by_rank(_tracebacks(answers)))
        lines.append(_by_rank({rank: self._stack(rank) for rank in silent}))
        return WorkersLost("\n".join(filter(None, lines)), codes, silent)

    def _stack(self, rank: int) -> str:
        """Where a busy worker is just now."""
        file, pid = self._file("stack", rank), self._processes[rank].pid
        if pid is None or not file.exists():
            return "has not come up yet"
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        stack, before = "", ""
        # It is written line by line: done when it grows no more.
        while (not stack or stack != before) and time.monotonic() < deadline:
            time.sleep(0.05)
            stack, before = file.read_text(), stack
        return stack


def _results(answers: _Answers) -> list[Any]:
    """What was returned; raises if anything was raised."""
    if tracebacks := _tracebacks(answers):
        raise WorkersFailed({rank: answers[rank].load() for rank in tracebacks}, tracebacks)
    return [answers[rank].load() for rank in sorted(answers)]


class _Worker:
    """The side of one process."""

    def __init__(self, rank: int, size: int, group_timeout: float) -> None:
        self._rank = rank
        self._size = size
        self._timeout = timedelta(seconds=group_timeout)
        self._groups: list[Any] = []

    def answer(self, request: Path | _Call) -> _Answer:
        """Do what is asked; whatever goes wrong is an answer too."""
        try:
            if isinstance(request, _Call):
                return _Answer(pickle.dumps(self._call(request)), left=self._left())
            self.leave()
            self._meet(request)
            return _Answer(pickle.dumps(None))
        except BaseException as error:
            return _Answer(_pickled(error), "".join(traceback.format_exception(error)))

    def _left(self) -> bool:
        plane = planes.get(dist.group.WORLD)
        return plane is not None and any(member.verdict for member in list(plane._members))

    def leave(self) -> None:
        """Give up all groups."""
        self._groups.clear()
        # Whatever a failed function has left in flight holds on to its group.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
            # Or DTensor would wait in these groups for ever, where a mesh equals one of theirs.
            forget_meshes()

    def _meet(self, store: Path) -> None:
        dist.init_process_group(
            "gloo",
            init_method=store.as_uri(),
            rank=self._rank,
            world_size=self._size,
            # Its own: here those who have loaded torch wait for those who have not yet.
            timeout=timedelta(seconds=MEETING_SECONDS),
        )
        for size in range(1, self._size + 1):
            # The timeout again: a new group does not inherit it, and would wait for half an hour.
            self._groups.append(dist.new_group(range(size), timeout=self._timeout))

    def _call(self, call: _Call) -> Any:
        fn, args = pickle.loads(call.payload)
        torch.manual_seed(0)
        # Groups are named by their number, and others may have made more of them than this one.
        dist.distributed_c10d._world.group_count = _GROUPS * call.number
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return fn(self._rank, self._groups[call.ranks - 1], *args)


def _work(
    rank: int, size: int, group_timeout: float, stack_file: Path, connection: Connection
) -> None:
    """Answer requests until the other end is closed: the main function of a worker."""
    # Ctrl-C reaches the workers as well; how it ends them is up to their parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settle()
    gc.freeze()  # or each collection would look at all that was imported
    worker = _Worker(rank, size, group_timeout)
    with stack_file.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        with suppress(EOFError, OSError):
            while True:
                connection.send(worker.answer(connection.recv()))
        worker.leave()
        gc.unfreeze()
        faulthandler.unregister(signal.SIGUSR1)


def _pickled(error: BaseException) -> bytes:
    """The exception, or its text where pickle would lose or change it."""
    try:
        payload = pickle.dumps(error)
        copy = pickle.loads(payload)
        # One that calls super().__init__() with another text comes back with a different one.
        if type(copy) is type(error) and str(copy) == str(error):
            return payload
    except Exception:
        pass
    return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _tracebacks(answers: Mapping[int, _Answer]) -> dict[int, str]:
    """The ranks that raised, in order, and where."""
    return {rank: text for rank in sorted(answers) if (text := answers[rank].traceback) is not None}


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _by_rank(texts: Mapping[int, str]) -> str:
    return "\n".join(f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in texts.items())
