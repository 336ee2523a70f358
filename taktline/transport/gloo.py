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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")
_INFOS = Path("/proc/self/fdinfo")
_EPOLL_WAITS = {"232", "281", "22"}
"""The numbers of epoll_wait and epoll_pwait on x86 and ARM."""
_LOOP = (64, 10)
"""For how many events and milliseconds gloo waits."""
_TARGET = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)


def shut() -> None:
    """End every wait in a gloo group of this process, here and at the other ends."""
    for connection in connections():
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def connections() -> Iterator[socket.socket]:
    """The connected sockets of every gloo group, each as a copy that is closed after its turn."""
    for fd in _awaited():
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as connection:
                    connection.getpeername()  # raises if it listens: shutting it would abort gloo
                    yield connection


def _awaited() -> Iterator[int]:
    """The descriptors for which gloo's event loops wait."""
    pythons = {thread.native_id for thread in threading.enumerate()}
    for task in _TASKS.glob("*"):
        with suppress(OSError, ValueError):
            number, *arguments = (task / "syscall").read_text().split()
            if number in _EPOLL_WAITS and int(task.name) not in pythons:
                epoll, _, most, milliseconds, *_ = (int(argument, 16) for argument in arguments)
                if (most, milliseconds) == _LOOP:
                    yield from map(int, _TARGET.findall((_INFOS / str(epoll)).read_text()))
