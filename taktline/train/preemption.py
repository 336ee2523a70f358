"""Preemption: after SIGTERM on any rank, all ranks end when an optimizer has used the gradients.

::

    step()             the ranks agree that one of them has received SIGTERM
    optimizer.step()   the position in the data and the random numbers are noted
    a learning rate scheduler steps, and the next batch is read
    step()             on_preempt(pipe): a save has the update, and what was noted before that batch
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple
from weakref import finalize, ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from taktline.checkpoint.saving import wait_for_all
from taktline.errors import UseError

PREEMPTED = 83
"""The exit code of every rank after ``on_preempt``."""

_ONE_SIGNAL = 2.0
"""Seconds in which further signals count as the first: launchers pass on what ranks get as well."""


class Position(NamedTuple):
    """Where training goes on, noted before the next batch was read."""

    random: dict[str, Any]
    """The state of all generators."""
    data: Any
    """The object with the position in the data, as far as it is known; and its state."""
    state: Any


class AnotherStep(BaseException):
    """A save needs a position that was not noted; it will be after one more step."""


class Preemption:
    """Listens for SIGTERM for a pipeline, until that is collected or ``close()`` is called."""

    def __init__(self, on_preempt: Callable[[Any], object], pipe: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UseError(
                "on_preempt handles SIGTERM, which only the main thread can; make the pipeline "
                "there"
            )
        self.on_preempt = on_preempt
        self.agreed = False
        """Whether all ranks know that one of them has received SIGTERM."""
        self.ending = False
        """Whether ``on_preempt`` is running; its own steps do not end the process."""
        self.position: Position | None = None
        self.waited = False
        """Whether a save has asked for one more step already."""
        self._noting: RemovableHandle | None = None
        _signals.join()
        self._pipe = ref(pipe)
        self.close = finalize(pipe, _signals.leave)
        """Stop listening."""

    def heard(self) -> bool:
        """Whether this process has received SIGTERM."""
        return _signals.heard is not None

    def agree(self) -> None:
        """Note the position now, and after each step of an optimizer."""
        self.agreed = True
        self._note()
        if self._noting is None:
            # An optimizer may draw random numbers, too.
            self._noting = register_optimizer_step_post_hook(self._note)

    def _note(self, *_: object) -> None:
        pipe = self._pipe()
        if pipe is not None and not torch.compiler.is_compiling():
            self.position = pipe._position()

    def forget(self) -> None:
        """Begin anew: nothing is agreed on or noted."""
        if self._noting is not None:
            self._noting.remove()
        self.ending = self.agreed = self.waited = False
        self.position = self._noting = None

    def end(self, pipe: Any) -> None:
        """Call ``on_preempt``, wait until it has returned on every rank, and end the process.

        Returns only if training has to go on for one more step.
        """
        self.ending = True
        try:
            self.on_preempt(pipe)
        except AnotherStep:
            self.ending, self.waited = False, True
            return
        finally:
            if self.ending:
                self._finish(pipe)
        raise SystemExit(PREEMPTED)

    def _finish(self, pipe: Any) -> None:
        # Launchers end the other ranks as soon as one has ended. Ranks that are not connected
        # any more, or have closed the pipeline, do not wait.
        with suppress(Exception):
            wait_for_all()
            pipe._ranks.on_any_rank(True, "the end of on_preempt")
        self.forget()
        _signals.heard = None


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
