"""The watchdog: reports where and why a step hangs, from the control plane's thread.

A step records only its position in the program; the watchdog reads the rest from the stack.
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
from typing import NoReturn, Self

import torch

from taktline.checks import seconds_in_environment
from taktline.plan import Kind
from taktline.runtime.program import Instruction, Program
from taktline.text import counted
from taktline.transport import Transport, gloo
from taktline.transport.control_news import COMPUTES, RESTS
from taktline.transport.distributed import Distributed
from taktline.transport.verdict import Verdict

STALL_SECONDS = seconds_in_environment("TAKTLINE_STALL_SECONDS", 60.0)
"""Seconds without progress after which a step is logged, unless a schedule sets others."""

STUCK_SECONDS = seconds_in_environment("TAKTLINE_STUCK_SECONDS", 5.0)
"""How long a wait may outlast its connections before its process is ended."""
STUCK = 84
"""The exit code of a process that was ended."""

_log = logging.getLogger("taktline")
_HOME = str(Path(__file__).parent.parent)
_OURS = tuple(
    str(Path(_HOME, "transport", f"{name}.py"))
    for name in (
        *("distributed", "connect", "listener", "lanes", "all_gather"),
        *("control_plane", "control_news"),
    )
)
_COLLECTIVES = ("_functional_collectives.py", "distributed_c10d.py")
_FRAMES = 4
"""In how many of the innermost frames a wait is looked for."""
_WRAPPERS = tuple(
    str(Path("torch", *parts))
    for parts in (("distributed", "utils.py"), ("nn", "parallel", "distributed.py"))
)
"""The innermost files while DDP waits for other ranks."""
_REST_SECONDS = 1.0
"""How long an operation of torch uses no processor before it counts as a wait."""
_UNKNOWN = -1
_TORCH = str(Path(torch.__file__).parent)
_LATE = 0.5
"""By how much a wait may outlast the timeout."""
_LEAVE_SECONDS = 0.1
"""How long after a verdict waits in groups of others are ended, too."""


class Watch:
    """Watches the steps of one schedule on this rank; ``transport`` is None for local ranks."""

    def __init__(self, name: str, transport: Distributed | None) -> None:
        self.seconds: float | None = STALL_SECONDS
        self.doing = ""
        """What this rank does outside of its program, in words."""
        self.program: Program | None = None
        self._name = name
        self._transport = transport
        self._thread = 0
        self._mark: object = None
        self._since = time.monotonic()
        self._reported = False
        self._leaves_at = math.inf
        self._native_thread = 0
        self._used, self._used_at = _UNKNOWN, math.inf
        """The processor time of the step's thread, and when it was last seen to grow."""

    def __enter__(self) -> Self:
        self._thread, self._native_thread = threading.get_ident(), threading.get_native_id()
        self._mark, self._since, self._reported = None, time.monotonic(), False
        self._leaves_at = self._used_at = math.inf
        if self._transport is not None:
            plane = self._transport.plane
            plane.state = self._state
            plane.watched = (*plane.watched, self)
        return self

    def __exit__(self, *_: object) -> None:
        self.program = self._mark = None
        if self._transport is not None:
            plane = self._transport.plane
            plane.watched = tuple(each for each in plane.watched if each is not self)
            outer = [each for each in plane.watched if isinstance(each, Watch)]
            plane.state = outer[-1]._state if outer else _idle

    def tick(self) -> None:
        """Check whether the step goes on; called on the plane's thread, some times a second."""
        transport, now, mark = self._transport, time.monotonic(), self._progress()
        if transport is None:
            return  # no plane calls this
        if mark != self._mark:
            self._mark, self._since, self._reported = mark, now, False
        if (used := _processor_time(self._native_thread)) != self._used:
            self._used, self._used_at = used, now
        stood = now - self._since
        if self.seconds is not None and stood >= self.seconds and not self._reported:
            self._reported = True
            _log.warning("%s", self.report(transport))
        if transport.verdict is not None:
            self._hurry(now, transport.verdict, transport.plane.process)
        elif transport.posts is not None and (stray := transport.posts.stray()) is not None:
            transport.give_up(stray)
        elif stood > transport.timeout.total_seconds() + _LATE and not self._computes():
            # A wait in a group of others, which has another timeout.
            transport.give_up(transport.plane.stalled(transport.processes, (), self._waits_for()))

    def _progress(self) -> object:
        """A value that changes when the step goes on."""
        return (self.doing, None if self.program is None else self.program.position)

    def report(self, transport: Distributed) -> str:
        """The state of all ranks, as far as they have reported it."""
        stood = _seconds(time.monotonic() - self._since)
        states = transport.plane.report(transport.processes)
        return f"rank {transport.rank} of {self._name} has made no progress for {stood}\n{states}"

    @property
    def _instruction(self) -> Instruction | None:
        return None if self.program is None else self.program.current

    def where(self) -> str:
        """The running action, in words; empty outside of the program."""
        instruction = self._instruction
        return "" if instruction is None else f"in {instruction.action}"

    def _state(self) -> tuple[str, bool]:
        """What this rank is doing, and for how long; True: it is in a step."""
        waited, instruction = _seconds(time.monotonic() - self._since), self._instruction
        if instruction is None:
            return f"{self.doing}, for {waited}", True
        if self._computes():
            return f"{instruction.action} for {waited}: {COMPUTES}{_place(self._frame())}", True
        return f"{instruction.action} for {waited}: waits for {self._waits_for()}", True

    def _waits_for(self) -> str:
        instruction = self._instruction
        if instruction is None:
            return self.doing.removeprefix("waits for ")
        if instruction.action.kind <= Kind.W and self._rests():
            return "an operation of torch to end, such as a collective"
        return instruction.waits or "other ranks"

    def _computes(self) -> bool:
        instruction = self._instruction
        if instruction is None or instruction.action.kind > Kind.W or self._frame() is None:
            return False
        return not self._waits()

    def _waits(self) -> bool:
        """Whether this rank waits for other ranks."""
        return _shows_wait(self._frame()) or self._rests()

    def _rests(self) -> bool:
        """Whether an operation of torch uses no processor, as a collective in a backward.

        Autograd calls such a collective, so no frame shows it.
        """
        frame = self._frame()
        inside = frame is not None and frame.f_code.co_filename.startswith((_HOME, _TORCH))
        rests = time.monotonic() - self._used_at > _REST_SECONDS
        return inside and rests and not _shows_wait(frame)

    def _frame(self) -> FrameType | None:
        # If the step's own thread asks, it has just given up waiting.
        if self._thread == threading.get_ident():
            return None
        return sys._current_frames().get(self._thread)

    def _hurry(self, now: float, verdict: Verdict, process: int) -> None:
        """End the waits of a step that goes on after a verdict: it waits in a group of others."""
        self._leaves_at = min(self._leaves_at, now + _LEAVE_SECONDS)
        if now >= self._leaves_at:
            gloo.shut()
        if now >= max(self._leaves_at, self._since) + STUCK_SECONDS and self._waits():
            self._end(verdict, process)

    def _end(self, verdict: Verdict, process: int) -> NoReturn:
        """End a process that would hang."""
        _log.critical(
            "%s\nrank %d %s, and cannot leave a collective that waits for others: its process "
            "ends, with exit code %d",
            verdict.error(range(verdict.process + 1)),
            process,
            self._state()[0],
            STUCK,
        )
        sys.stderr.flush()
        os._exit(STUCK)


def _idle() -> tuple[str, bool]:
    return "is not in a step", False


def _processor_time(thread: int) -> int:
    """The processor time of a thread of this process, in ticks, if the system reports it."""
    try:
        after_name = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _UNKNOWN
    return int(after_name[11]) + int(after_name[12])


def _shows_wait(frame: FrameType | None) -> bool:
    """Whether a frame waits for a message, or in a collective of torch."""
    if frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        return True
    for _ in range(_FRAMES):
        if frame is None:
            return False
        name = frame.f_code.co_filename
        if name in _OURS or name.endswith(_COLLECTIVES) or f"{os.sep}fsdp{os.sep}" in name:
            return True
        frame = frame.f_back
    return False


class _Guard(Watch):
    """Watches a call outside of a step; any change of its frame counts as progress."""

    def _progress(self) -> object:
        frame = self._frame()
        return frame, None if frame is None else frame.f_lasti

    def _computes(self) -> bool:
        return not self._waits()

    def _state(self) -> tuple[str, bool]:
        waited, frame = _seconds(time.monotonic() - self._since), self._frame()
        if frame is None or _shows_wait(frame):
            doing = "waits for other ranks"
        elif self._rests():
            doing = RESTS
        else:
            doing = f"{COMPUTES}{_place(frame)}"
        return f"{self.doing} for {waited}: {doing}", True


@contextmanager
def guarded(transport: Transport, what: str) -> Iterator[str]:
    """End waits inside of the block as in a step, and raise why they were ended."""
    if not isinstance(transport, Distributed):
        yield what
        return
    watch = _Guard(what, transport)
    watch.doing, watch.seconds = f"is in {what}", None
    with watch:
        try:
            yield what
        except Exception as error:
            cause = transport.explain(error) or error
            if transport.verdict is not None:
                transport.entangle(cause)
            if cause is error:
                raise
            raise cause from error


def _place(frame: FrameType | None) -> str:
    """The place in the user's own code, in words."""
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
