"""Preemption: after SIGTERM on any rank, all ranks end with the running step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn
from weakref import finalize

from taktline.errors import UseError

PREEMPTED = 83
"""The exit code of every rank after ``on_preempt``."""

_ONE_SIGNAL = 2.0
"""Seconds in which further signals count as the first: launchers pass on what ranks get as well."""


class Preemption:
    """Listens for SIGTERM for a pipeline, until ``owner`` is collected or ``close()`` is called."""

    def __init__(self, on_preempt: Callable[[Any], object], owner: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UseError(
                "on_preempt handles SIGTERM, which only the main thread can; make the pipeline "
                "there"
            )
        self.on_preempt = on_preempt
        self.ending = False
        """Whether ``on_preempt`` is running; its own steps do not end the process."""
        _signals.join()
        self.close = finalize(owner, _signals.leave)
        """Stop listening."""

    def heard(self) -> bool:
        """Whether this process has received SIGTERM."""
        return _signals.heard is not None

    def end(self, pipe: object, wait: Callable[[], object]) -> NoReturn:
        """Call ``on_preempt``, wait until it has returned on every rank, and end the process."""
        self.ending = True
        try:
            self.on_preempt(pipe)
        finally:
            # Launchers end the other ranks as soon as one has ended. Ranks that are not connected
            # any more, or have closed the pipeline, do not wait.
            with suppress(Exception):
                wait()
            self.ending, _signals.heard = False, None
        raise SystemExit(PREEMPTED)


class _Signals:
    """The handler of SIGTERM in this process, while any pipeline listens."""

    def __init__(self) -> None:
        self.heard: float | None = None
        """When SIGTERM came first."""
        self._listeners = 0
        self._before: Any = signal.SIG_DFL

    def join(self) -> None:
        if signal.getsignal(signal.SIGTERM) != self._hear:
            # None: the handler before was not set from Python, so it cannot be called or restored.
            self._before = signal.signal(signal.SIGTERM, self._hear) or signal.SIG_DFL
        self._listeners += 1

    def leave(self) -> None:
        self._listeners -= 1
        here = threading.current_thread() is threading.main_thread()
        # Another thread cannot set handlers: ours stays, and does what the one before would.
        if not self._listeners and here and signal.getsignal(signal.SIGTERM) == self._hear:
            signal.signal(signal.SIGTERM, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now, before = time.monotonic(), self._before
        once = self.heard is None or now - self.heard <= _ONE_SIGNAL
        if self._listeners and once:
            self.heard = self.heard or now
        elif self._listeners or before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        if callable(before):
            before(number, frame)


_signals = _Signals()
