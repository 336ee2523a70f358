"""Threads that are used again: after its work, a thread waits some seconds for more.

A new thread is slow at first, as libraries set up their state for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

_IDLE_SECONDS = 10.0
_idle: list[_Worker] = []


def start(work: Callable[[], None], then: Callable[[], None]) -> None:
    """Call ``work`` on a thread, and ``then`` after the thread can be used again."""
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker(daemon=True)
        worker.start()
    worker.jobs.put((work, then))


class _Worker(threading.Thread):
    def __init__(self, *, daemon: bool) -> None:
        super().__init__(daemon=daemon)
        self.jobs: SimpleQueue[tuple[Callable[[], None], Callable[[], None]]] = SimpleQueue()

    def run(self) -> None:
        """Work until there has been nothing to do for a while."""
        while True:
            try:
                work, then = self.jobs.get(timeout=_IDLE_SECONDS)
            except Empty:
                try:
                    _idle.remove(self)
                except ValueError:
                    continue  # somebody has just taken it
                return
            work()
            del work
            _idle.append(self)
            then()
            del then


os.register_at_fork(after_in_child=_idle.clear)
