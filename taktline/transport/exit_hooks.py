"""The control planes of this process, and hooks for when the process ends or forks."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakKeyDictionary

planes: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The control plane of each default process group."""
notes: list[Callable[[BaseException], None]] = []
"""Called with an error that ends the program, to add notes to it."""


def _close_all() -> None:
    """Close all planes at the end of the program, which in multiprocessing may be an error."""
    error = sys.exc_info()[1]
    for plane in list(planes.values()):
        if error is not None and not isinstance(error, SystemExit):
            plane.raised(error)
        plane.close()


def _forked() -> None:
    """Close the sockets of the parent in a forked process, such as a data loader's worker.

    While it holds them, no other process notices that its parent has died.
    """
    for plane in list(planes.values()):
        plane.close_inherited()


def _excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Announce that an error ends this program, and call the hook that was there before."""
    for note in notes:
        with suppress(Exception):
            note(error)
    for plane in list(planes.values()):
        with suppress(Exception):
            plane.raised(error)
    _before(kind, error, trace)


_before = sys.excepthook
sys.excepthook = _excepthook
atexit.register(_close_all)
os.register_at_fork(after_in_child=_forked)
# A process of multiprocessing ends without calling what atexit has registered.
Finalize(None, _close_all, exitpriority=100)
