"""Looks after steps from a thread of its own: when one stands still, it tells where and why.

Nothing is noted for it on the way but the position in the program. What a rank is doing there it
reads off the rank's stack when it looks.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Protocol, Self
from weakref import WeakSet

from taktline.checks import seconds_in_environment
from taktline.plan import Kind
from taktline.plan.words import counted
from taktline.runtime.executor import Program
from taktline.transport.board import Board, Word

__all__ = ["STALL_SECONDS", "Watch"]

STALL_SECONDS = seconds_in_environment("TAKTLINE_STALL_SECONDS", 60.0)
"""After how long a step that stands still is told of, unless a schedule says otherwise."""

_log = logging.getLogger("taktline")
_HOME = str(Path(__file__).parent.parent)
_WAITS = str(Path(_HOME, "transport", "distributed.py"))
_LEAST_TICK = 0.05


class Watch:
    """The steps of one schedule on this rank, under the watchdog's eyes while they run."""

    def __init__(self, name: str, rank: int, board: Board | None) -> None:
        self.seconds: float | None = STALL_SECONDS
        self.doing = ""
        """What this rank does outside of its program."""
        self.program: Program | None = None
        self._name = name
        self._rank = rank
        self._board = board
        self._thread = 0
        self._mark: object = None
        self._since = time.monotonic()
        self._told = False
        self._announced = False

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._mark, self._since = None, time.monotonic()
        if self.seconds is not None and self._board is not None:
            if not self._announced:
                self._announced = True
                self._board.write("has begun a step")
            _dog.watch(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.program = None
        _dog.leave(self)

    def look(self) -> None:
        """See whether the step goes on, leave word of it, and tell if it does not."""
        now, seconds, board = time.monotonic(), self.seconds, self._board
        mark = (self.doing, None if self.program is None else self.program.position)
        if mark != self._mark:
            self._mark, self._since, self._told = mark, now, False
        if board is None or seconds is None:
            return
        board.write(self.state())
        if now - self._since >= seconds and not self._told:
            self._told = True
            _log.warning("%s", self.report())

    def rest(self) -> None:
        """Leave word that no step is running."""
        self._announced = False
        if self._board is not None:
            self._board.write("is not in a step", busy=False)

    def state(self) -> str:
        """What this rank is doing, and for how long."""
        # If it asks itself, it has just given up waiting.
        asks_itself = self._thread == threading.get_ident()
        frame = None if asks_itself else sys._current_frames().get(self._thread)
        waited = _seconds(time.monotonic() - self._since)
        instruction = None if self.program is None else self.program.current
        if instruction is None:
            return f"{self.doing}, for {waited}"
        computes = instruction.action.kind <= Kind.W
        if frame is not None and computes and not _waits(frame):
            return f"{instruction.action} for {waited}: computes{_place(frame)}"
        return f"{instruction.action} for {waited}: waits for {instruction.waits or 'other ranks'}"

    def report(self) -> str:
        """What all ranks are doing, as far as they have said."""
        lines = [
            f"rank {self._rank} of {self._name} has stood still for "
            f"{_seconds(time.monotonic() - self._since)}",
            f"  rank {self._rank}: {self.state()}",
        ]
        for rank, word in enumerate(self._board.read() if self._board is not None else []):
            if rank == self._rank:
                continue
            lines.append(f"  rank {rank}: {self._heard(word)}")
        return "\n".join(lines)

    def _heard(self, word: Word | None) -> str:
        if word is None:
            return "has not begun a step"
        if not word.busy:
            return f"{word.text}, for {_seconds(word.age)}"
        if self.seconds is None or word.age <= 2 * _tick(self.seconds):
            return word.text
        silence = f"not heard of for {_seconds(word.age)} (stopped, or its process has ended)"
        return f"{silence}; then: {word.text}"


class _Looked(Protocol):
    seconds: float | None

    def look(self) -> None: ...
    def rest(self) -> None: ...


class _Dog:
    """The thread that looks; there is one for all schedules of a process, once it is needed."""

    def __init__(self) -> None:
        self._watched: list[_Looked] = []
        self._left: WeakSet[_Looked] = WeakSet()  # a schedule that is gone leaves no word
        self._needed = threading.Event()
        self._hurry = threading.Event()
        self._pause = 0.0
        self._thread: threading.Thread | None = None
        self._pid = 0

    def watch(self, watch: _Looked) -> None:
        """Look after a step from now on."""
        if self._thread is None or self._pid != os.getpid():  # a fork leaves threads behind
            self._pid = os.getpid()
            self._needed, self._hurry = threading.Event(), threading.Event()
            self._thread = threading.Thread(target=self._run, name="taktline watchdog", daemon=True)
            self._thread.start()
        self._watched.append(watch)
        self._needed.set()
        if watch.seconds is not None and _tick(watch.seconds) < self._pause:
            self._hurry.set()  # it sleeps for longer than this step allows

    def leave(self, watch: _Looked) -> None:
        """Look no longer."""
        if watch in self._watched:
            self._watched.remove(watch)
            self._left.add(watch)

    def _run(self) -> None:
        while True:
            self._needed.wait()
            seconds = [watch.seconds for watch in list(self._watched) if watch.seconds is not None]
            self._pause = _tick(min(seconds, default=STALL_SECONDS))
            self._hurry.wait(self._pause)
            self._hurry.clear()
            self._look()
            self._needed.clear()
            if self._watched:  # looked up afterwards, since a step may begin in between
                self._needed.set()

    def _look(self) -> None:
        left, self._left = self._left, WeakSet()
        running = list(self._watched)
        for watch in dict.fromkeys([*running, *left]):
            try:
                watch.look() if watch in running else watch.rest()
            except Exception as error:  # the step matters more than what is told of it
                _log.debug("the watchdog could not look: %s", error)


_dog = _Dog()


def _tick(seconds: float) -> float:
    """How often to look."""
    return max(_LEAST_TICK, seconds / 4)


def _waits(frame: FrameType) -> bool:
    """Whether a rank is in the middle of a message."""
    return frame.f_code.co_filename == _WAITS


def _place(frame: FrameType | None) -> str:
    """Where in the user's own code a rank is."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_HOME) and "site-packages" not in name and "<" not in name:
            return f", in {Path(name).name}, line {frame.f_lineno} ({frame.f_code.co_qualname})"
        if name.startswith(_HOME):
            return ""
        frame = frame.f_back
    return ""


def _seconds(seconds: float) -> str:
    return counted(round(seconds), "second") if seconds >= 1 else f"{seconds:.1f} seconds"
