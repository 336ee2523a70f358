"""The watchdog: reports where and why a step hangs, from the control plane's thread.

A step records only its position in the program; whether it computes or waits is read from the
innermost frames of its thread.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

from taktline.checks import number_in_environment
from taktline.plan import Kind
from taktline.runtime.program import Instruction, Program
from taktline.text import counted
from taktline.transport import Transport, gloo
from taktline.transport.distributed import Distributed
from taktline.transport.news import COMPUTES

STALL_SECONDS = number_in_environment("TAKTLINE_STALL_SECONDS", 60.0)
"""Seconds without progress after which a step is logged, unless a schedule sets others."""
STUCK_SECONDS = number_in_environment("TAKTLINE_STUCK_SECONDS", 5.0)
"""How long a wait may outlast its connections before its process is ended."""
STUCK = 84
"""The exit code of a process that was ended."""

_log = logging.getLogger("taktline")
_HOME = str(Path(__file__).parent.parent)
_TRANSPORT = str(Path(_HOME, "transport"))
_COLLECTIVES = ("_functional_collectives.py", "distributed_c10d.py")
_OF_DDP = tuple(map(str, (Path("torch/distributed/utils.py"), Path("nn/parallel/distributed.py"))))
"""The innermost files while DDP waits for other ranks."""
_FRAMES = 4
"""In how many of the innermost frames a wait is looked for."""
_LATE = 0.5
"""By how much a wait may outlast the timeout."""
_LEAVE_SECONDS = 0.1
"""How long after a verdict waits in groups of others are ended, too."""


class Watch:
    """Watches the steps of one schedule on this rank, or another call that all ranks make.

    ``transport`` is None for local ranks: nobody watches them.
    """

    def __init__(self, name: str, transport: Distributed | None) -> None:
        self.seconds: float | None = STALL_SECONDS
        self.doing = ""
        """What this rank does outside of its program, in words."""
        self.program: Program | None = None
        self._name = name
        self._transport: Any = transport
        self._thread = 0
        self._mark: object = None
        self._since = time.monotonic()
        self._reported = False
        self._leaves_at = math.inf

    def __enter__(self) -> Self:
        self._thread, self._leaves_at = threading.get_ident(), math.inf
        self._mark, self._since, self._reported = None, time.monotonic(), False
        plane = self._transport.plane
        plane.news.state, plane.watched = self._state, (*plane.watched, self)
        return self

    def __exit__(self, *_: object) -> None:
        self.program = self._mark = None
        plane = self._transport.plane
        plane.watched = tuple(each for each in plane.watched if each is not self)
        outer = [each for each in plane.watched if isinstance(each, Watch)]
        plane.news.state = outer[-1]._state if outer else _idle

    def tick(self) -> None:
        """Check whether the step goes on; called on the plane's thread, some times a second."""
        transport, now, mark = self._transport, time.monotonic(), self._progress()
        if mark != self._mark:
            self._mark, self._since, self._reported = mark, now, False
        stood = now - self._since
        if self.seconds is not None and stood >= self.seconds and not self._reported:
            self._reported = True
            _log.warning("%s", self.report())
        if transport.verdict is not None:
            self._hurry(now)
        elif stood > transport.timeout.total_seconds() + _LATE and not self._computes():
            # A wait in a group of others, which has another timeout.
            transport.give_up(transport.plane.stalled(transport.processes, (), self._waits_for()))

    def report(self) -> str:
        """The state of all ranks, as far as they have reported it."""
        rank, ranks = self._transport.rank, self._transport.plane.report(self._transport.processes)
        return f"rank {rank} of {self._name} has made no progress for {self._stood}\n{ranks}"

    def where(self) -> str:
        """The running action, in words; empty outside of the program."""
        return "" if self._instruction is None else f"in {self._instruction.action}"

    def _progress(self) -> object:
        """A value that changes when the step goes on."""
        if self.program is not None:
            return self.doing, self.program.position
        frame = self._frame()
        if frame is None or _shows_wait(frame):
            return self.doing
        return self.doing, frame, frame.f_lasti

    @property
    def _instruction(self) -> Instruction | None:
        return None if self.program is None else self.program.current

    @property
    def _stood(self) -> str:
        seconds = time.monotonic() - self._since
        return counted(round(seconds), "second") if seconds >= 1 else f"{seconds:.1f} seconds"

    def _state(self) -> tuple[str, bool]:
        """What this rank is doing, and for how long; True: it is in a step."""
        what = self.doing if self._instruction is None else self._instruction.action
        does = f"waits for {self._waits_for()}"
        if self._computes():
            does = f"{COMPUTES}{_place(self._frame())}"
        return f"{what} for {self._stood}: {does}", True

    def _waits_for(self) -> str:
        return (self._instruction and self._instruction.waits) or "other ranks"

    def _computes(self) -> bool:
        instruction, frame = self._instruction, self._frame()
        if frame is None or (instruction is not None and instruction.action.kind >= Kind.SEND_F):
            return False
        return not _shows_wait(frame)

    def _frame(self) -> FrameType | None:
        # If the step's own thread asks, it has just given up waiting.
        if self._thread == threading.get_ident():
            return None
        return sys._current_frames().get(self._thread)

    def _hurry(self, now: float) -> None:
        """End the waits of a step that goes on after a verdict: it waits in a group of others."""
        self._leaves_at = min(self._leaves_at, now + _LEAVE_SECONDS)
        if now >= self._leaves_at:
            gloo.shut()
        stuck = now >= max(self._leaves_at, self._since) + STUCK_SECONDS
        if stuck and _shows_wait(self._frame()):
            verdict = self._transport.verdict
            _log.critical(
                "%s\nrank %d %s, and cannot leave a collective that waits for others: its process "
                "ends, with exit code %d",
                verdict.error(range(verdict.process + 1)),
                self._transport.plane.process,
                self._state()[0],
                STUCK,
            )
            sys.stderr.flush()
            os._exit(STUCK)


@contextmanager
def guarded(transport: Transport, what: str) -> Iterator[str]:
    """End waits inside of the block as in a step, and raise why they were ended."""
    if not isinstance(transport, Distributed):
        yield what
        return
    watch = Watch(what, transport)
    watch.doing, watch.seconds = f"is in {what}", None
    with watch:
        try:
            yield what
        except Exception as error:
            cause = transport.explain(error) or error
            if transport.verdict is not None:
                transport.mark(cause)
            if cause is error:
                raise
            raise cause from error


def _idle() -> tuple[str, bool]:
    return "is not in a step", False


def _shows_wait(frame: FrameType | None) -> bool:
    """Whether a frame waits for a message, or in a collective of torch."""
    for depth in range(_FRAMES):
        if frame is None:
            return False
        name = frame.f_code.co_filename
        if name.startswith(_TRANSPORT) or name.endswith(_COLLECTIVES):
            return True
        if f"{os.sep}fsdp{os.sep}" in name or (not depth and name.endswith(_OF_DDP)):
            return True
        frame = frame.f_back
    return False


def _place(frame: FrameType | None) -> str:
    """The place in the user's own code, in words."""
    while frame is not None and not (name := frame.f_code.co_filename).startswith(_HOME):
        if "site-packages" not in name and "<" not in name:
            return f", in {Path(name).name}, line {frame.f_lineno} ({frame.f_code.co_qualname})"
        frame = frame.f_back
    return ""
