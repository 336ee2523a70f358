"""gloo's connections: how a wait on them is left, which gloo itself does not offer.

gloo has no abort. But a socket that is shut down ends every wait on it, at both ends, at once. The
sockets of a backend of our own are those that came into being with it. Those of other groups, in
which DDP or FSDP may wait, are found by gloo's threads: each waits for one epoll descriptor, and
Linux tells which sockets that one minds. Elsewhere than on Linux a wait lasts until its timeout.

Before torch 2.13 these threads have no name of their own. They are known by how they wait: for at
most 64 events, and 10 milliseconds, in a thread that is not Python's.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

__all__ = ["Sockets", "calm_gloo", "every_socket", "made_by"]

T = TypeVar("T")
Sockets = dict[int, int]
"""Descriptors, each with the inode that it has as long as it is the same socket."""

_TASKS = Path("/proc/self/task")
_DESCRIPTORS = Path("/proc/self/fd")
_INFOS = Path("/proc/self/fdinfo")
_EPOLL_WAITS = {"232", "281", "22"}
"""The numbers of epoll_wait and epoll_pwait on x86 and ARM."""
_LOOP = (64, 10)
"""For how many events and milliseconds gloo waits."""
_LOOKS, _PAUSE = 20, 0.001
"""How often, and after how many seconds again, gloo's threads are asked what they mind."""
_TARGET = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)


def made_by(make: Callable[[], T], count: int) -> tuple[T, Sockets]:
    """What a function makes, and the connections of gloo that came into being with it.

    ``count`` is how many there are. Other threads may open sockets meanwhile: those that gloo does
    not mind are not among them.
    """
    before, epolls = _sockets(_numbers(_DESCRIPTORS)), set(_open_epolls())
    made = make()
    new = [epoll for epoll in _open_epolls() if epoll not in epolls]
    found = _sockets(fd for epoll in new for fd in _targets(epoll))
    for _ in range(_LOOKS):
        if len(found) >= count:
            break
        # The epoll descriptor may have the number of an earlier one: then a thread tells it,
        # unless it is running at the moment.
        found |= {fd: inode for fd, inode in every_socket().items() if before.get(fd) != inode}
        time.sleep(_PAUSE)
    return made, found


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


def calm_gloo() -> None:
    """Keep gloo's event loops from interrupting the very calls that they then wait for.

    Such a loop spins while a call holds the lock of a connection. If the call's own write has woken
    it on the same core, it spins away a whole time slice in which the call cannot go on: some
    milliseconds, for a message of microseconds. A thread of the batch class waits its turn.
    """
    with suppress(AttributeError, OSError):  # neither there nor needed except on Linux
        for thread, _ in _loops():
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


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


def _open_epolls() -> Iterator[int]:
    """The epoll descriptors of this process, whoever waits for them."""
    for fd in _numbers(_DESCRIPTORS):
        with suppress(OSError):
            if os.readlink(_DESCRIPTORS / str(fd)) == "anon_inode:[eventpoll]":
                yield fd


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
    """Those that are connected sockets; shutting a listening one would make gloo abort."""
    found: Sockets = {}
    for fd in descriptors:
        with suppress(OSError):
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(fd)) as connection:
                    connection.getpeername()
                found[fd] = status.st_ino
    return found
