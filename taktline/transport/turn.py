"""A block for one thread at a time, which refuses a second thread instead of waiting."""

from __future__ import annotations

import threading
from contextvars import ContextVar

from taktline.errors import UseError


class Turn:
    """A block for one thread at a time: a second thread is refused, and so is a nested block."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._thread = ""
        self._outer: tuple[Turn, ...] = ()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise UseError(self._story())
        self._thread = threading.current_thread().name
        self._outer = _inside.get()
        _inside.set((*self._outer, self))

    def __exit__(self, *_: object) -> None:
        _inside.set(self._outer)
        self._lock.release()

    def _story(self) -> str:
        if self in _inside.get():
            return (
                f"{self._what} is running, and was called again from inside: by a stage's forward, "
                "a loss function or a hook; call it from outside"
            )
        return (
            f"{self._what} is running in thread {self._thread!r}, and was called from thread "
            f"{threading.current_thread().name!r}; it runs once at a time: let the threads wait "
            "for each other, or use one for each"
        )


# In the context rather than by thread: the ranks of local.run have threads of their own.
_inside: ContextVar[tuple[Turn, ...]] = ContextVar("inside", default=())
