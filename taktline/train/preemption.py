"""Preemption: after SIGTERM on any rank, all ranks end when an optimizer has used the gradients.

::

    step()             the ranks agree that one of them has received SIGTERM, and note the position
                       in the data and the random numbers
    optimizer.step()
    a learning rate scheduler steps, and the next batch is read
    step()             on_preempt(pipe): a save has the update, and what was noted before that batch
"""

from __future__ import annotations

import copy
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any
from weakref import WeakSet

from taktline.checkpoint.saving import RandomNumbers, Training, wait_for_all
from taktline.train.build import Built

_log = logging.getLogger("taktline")

PREEMPTED = 83
"""The exit code of every rank after ``on_preempt``."""


class AnotherStep(BaseException):
    """A save needs a position that was not noted; it will be after one more step."""


class Preemption:
    """Listens for SIGTERM for a pipeline, until that is collected or ``close()`` is called.

    Python lets only the main thread do so.
    """

    def __init__(self, on_preempt: Callable[[Any], object]) -> None:
        self._on_preempt = on_preempt
        self._data: Any = None
        """The object with the position in the data, of the latest save or load."""
        self._forget()
        _signals.join(self)

    def _forget(self) -> None:
        """Begin anew: nothing is agreed on or noted."""
        self._ending = False
        """Whether ``on_preempt`` is running; its own steps do not end the process."""
        self._waited = False
        """Whether a save has asked for one more step already."""
        self._noted: dict[str, Any] = {}
        """Where training goes on, from before the next batch was read: what a save takes of it.

        There is something as soon as all ranks know that one of them has received SIGTERM.
        """
        self._noted_of: Any = None
        """The object with the position in the data at that time."""

    def listen(self, built: Built) -> None:
        """Let every step ask whether SIGTERM has come, which may be before the first one."""
        built.schedule._runner.agreement.asks_to_stop = lambda: _signals.heard

    def hear(self, built: Built) -> None:
        """Agree whether SIGTERM has reached any rank; all ranks call this after a step or eval."""
        if self._ending:
            return
        heard = built.schedule._runner.agreement.preempted
        if self._noted or built.ranks.in_any_pipeline(heard, "whether to end"):
            data = None if self._data is None else copy.deepcopy(self._data.state_dict())
            self._noted = {"random": RandomNumbers(built.model).state_dict(), "data": data}
            self._noted_of = self._data

    def use(self, data: Any) -> None:
        """Note the object with the position in the data."""
        self._data = self._data if data is None else data

    def place(self, built: Built, training: Training) -> None:
        """In ``on_preempt``, save the position from before the batch of the step that waits."""
        self.use(training.data)
        if not self._ending:
            return
        training.noted = self._noted
        unknown = training.data is not None and training.data is not self._noted_of
        if built.ranks.on_any_rank(unknown and not self._waited, "save()"):
            raise AnotherStep
        if unknown:
            training.noted = {"random": self._noted["random"]}
            _log.warning(
                "the save in on_preempt has another object as data=… than saves before it, whose "
                "position may be a batch too far; pass the same object to every save and load"
            )

    def end_if_agreed(self, pipe: Any) -> None:
        """End this process if SIGTERM has reached any rank, unless gradients wait anywhere.

        ``on_preempt`` is called, and has returned on every rank. This returns if training has to go
        on, if only for one more step.
        """
        if self._ending or not self._noted:
            return
        built: Built = pipe._built
        if built.ranks.on_any_rank(built.schedule._runner.awaits_update(), "whether to end"):
            return
        self._ending = True
        try:
            self._on_preempt(pipe)
        except AnotherStep:
            self._ending, self._waited = False, True
            return
        finally:
            if self._ending:
                # Launchers end the other ranks as soon as one has ended. Ranks that are not
                # connected any more do not wait.
                with suppress(Exception):
                    wait_for_all()
                    built.ranks.on_any_rank(True, "the end of on_preempt")
                self._forget()
                _signals.heard = False
        raise SystemExit(PREEMPTED)

    def close(self) -> None:
        """Stop listening."""
        _signals.leave(self)
        self._forget()


class _Signals:
    """The handler of SIGTERM in this process, while any pipeline listens."""

    def __init__(self) -> None:
        self.heard = False
        """Whether this process has received SIGTERM while a pipeline listened."""
        self.listeners: WeakSet[Preemption] = WeakSet()
        self._before: Any = signal.SIG_DFL

    def join(self, listener: Preemption) -> None:
        if signal.getsignal(signal.SIGTERM) != self._hear:
            # None: the handler before was not set from Python, so it cannot be called.
            self._before = signal.signal(signal.SIGTERM, self._hear) or signal.SIG_DFL
        self.listeners.add(listener)

    def leave(self, listener: Preemption) -> None:
        self.listeners.discard(listener)
        if not self.listeners and signal.getsignal(signal.SIGTERM) == self._hear:
            with suppress(ValueError):  # another thread cannot set handlers; ours calls that before
                signal.signal(signal.SIGTERM, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = self.heard or len(self.listeners) > 0
        if callable(self._before):
            self._before(number, frame)
        elif not self.listeners and self._before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


_signals = _Signals()
