"""The control planes of this process, and what they do when it ends or is forked."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["planes"]


planes: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""By the default process group."""


def _all() -> list[Any]:
    return list(planes.values())


def _close_all() -> None:
    """At the end of the program; a process of multiprocessing may end by an error here."""
    error = sys.exc_info()[1]
    for plane in _all():
        if error is not None and not isinstance(error, SystemExit):
            plane.raised(error)
        plane.close()


def _forked() -> None:
    """In a process that was forked, such as a loader's: let go of sockets that are its parent's.

    As long as it held them, nobody would notice that its parent has died.
    """
    for plane in _all():
        plane.close_inherited()


def _excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Tell the others that an error ends this program, and then do what is done otherwise."""
    for plane in _all():
        with suppress(Exception):
            plane.raised(error)
    _before(kind, error, trace)


_before = sys.excepthook
sys.excepthook = _excepthook
atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
# A process of multiprocessing ends without what atexit has.
Finalize(None, _close_all, exitpriority=100)
