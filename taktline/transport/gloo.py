"""Ends waits in gloo's own connections, in which DDP or FSDP may wait.

gloo has no abort. But shutting a socket down ends nearly every wait on it, at both ends, at once.
The sockets are found by gloo's threads: each waits for one epoll descriptor, and Linux lists the
sockets of that descriptor. On other systems a wait lasts until its timeout.

Before torch 2.13 these threads have no name of their own. They are known by how they wait: for at
most 64 events, and 10 milliseconds, in a thread that is not Python's.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["Sockets", "every_socket", "shut"]

Sockets = dict[int, int]
"""Descriptors, each with the inode that it has as long as it is the same socket."""

_TASKS = Path("/proc/self/task")
_INFOS = Path("/proc/self/fdinfo")
_EPOLL_WAITS = {"232", "281", "22"}
"""The numbers of epoll_wait and epoll_pwait on x86 and ARM."""
_LOOP = (64, 10)
"""For how many events and milliseconds gloo waits."""
_TARGET = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)


def every_socket() -> Sockets:
    """The connected sockets of every gloo group of this process."""
    return _sockets(fd for _, epoll in _loops() for fd in _targets(epoll))


def shut(sockets: Sockets) -> None:
    """End every wait on sockets, here and at their other ends."""
    for fd, inode in sockets.items():
        with suppress(OSError):
            copy = os.dup(fd)
            # The number may have been given to another file since.
            if os.fstat(copy).st_ino != inode:
                os.close(copy)
                continue
            with socket.socket(fileno=copy) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _loops() -> Iterator[tuple[int, int]]:
    """The threads of gloo's event loops, and the descriptors that they wait for."""
    pythons = {thread.native_id for thread in threading.enumerate()}
    for thread in _numbers(_TASKS):
        with suppress(OSError, ValueError):
            number, *arguments = (_TASKS / str(thread) / "syscall").read_text().split()
            if number in _EPOLL_WAITS and thread not in pythons:
                epoll, _, most, milliseconds, *_ = (int(argument, 16) for argument in arguments)
                if (most, milliseconds) == _LOOP:
                    yield thread, epoll


def _targets(epoll: int) -> Iterable[int]:
    try:
        return map(int, _TARGET.findall((_INFOS / str(epoll)).read_text()))
    except OSError:
        return ()


def _numbers(folder: Path) -> Iterable[int]:
    try:
        return [int(entry.name) for entry in folder.iterdir()]
    except OSError:
        return ()


def _sockets(descriptors: Iterable[int]) -> Sockets:
    """The connected sockets of these descriptors; shutting a listening one would abort gloo."""
    found: Sockets = {}
    for fd in descriptors:
        with suppress(OSError):
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(fd)) as connection:
                    connection.getpeername()
                found[fd] = status.st_ino
    return found
