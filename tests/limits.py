"""A time limit for a piece of Python, by a timer of the system: it needs nobody to press Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager


class TooLong(BaseException):
    """The time is over; no catch-all on the way may hold it up."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise a TooLong after so long; limits may lie within each other. For the main thread.

    >>> with at_most(0.05):
    ...     time.sleep(60)
    Traceback (most recent call last):
    tests.limits.TooLong: no end within 0.05 s
    """

    def over(*_: object) -> None:
        raise TooLong(f"no end within {seconds:g} s")

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, over)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # of the limit around this one
            signal.setitimer(signal.ITIMER_REAL, max(0.01, left - (time.monotonic() - began)))
