"""Who may connect to this process: a listening socket, and the greeting that a caller begins with.

A greeting is the listener's token and a number. Callers are served side by side: one that says
nothing keeps nobody else waiting, and is gone after some seconds. Only so many may be without a
greeting at a time; one more drops the oldest of them.

On Linux a listener may have a name, too, at which processes on the same host reach it without TCP,
in less of the kernel's time. All users can see that name, so only processes of the same user are
let in there.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Self

Address = tuple[str, int, str, str]
ADDRESS = (str, int, str, str)
"""Host, port, the token without which a caller is refused, and the name on the host or ""."""
NOWHERE: Address = ("", 0, "", "")
"""The address of a process that has ended."""

_NUMBER = 4
"""Bytes of the number in a greeting."""
_TOKEN = 32
"""Bytes of a token."""
_GREETING_SECONDS = 5.0
"""How long a caller may take for its greeting."""
_STRANGERS = 128
"""How many callers may be without a greeting at a time."""
_BREATH = 0.05
"""Seconds until callers are taken again after the system has refused one: it has no room."""


class Listener:
    """A listening socket; to be used in a ``with`` block, or closed.

    >>> with Listener("127.0.0.1", named=True) as listener:
    ...     caller = call(listener.address, 3, 5.0)
    ...     [(number, connection)] = listener.accept(5.0)
    >>> number
    3
    >>> caller.close(), connection.close()
    (None, None)
    """

    def __init__(self, host: str, callers: int = 16, *, named: bool = False) -> None:
        """``callers`` are expected; ``named``: whether to listen at a name on this host, too."""
        family, *_, at = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        token, name = secrets.token_hex(_TOKEN // 2), ""
        self._token = token.encode()
        backlog = callers + _STRANGERS
        server = socket.create_server(at, family=family, backlog=backlog)
        self._servers = [server]
        if named and sys.platform == "linux":
            name = secrets.token_hex(16)
            self._servers.append(socket.socket(socket.AF_UNIX))
            self._servers[-1].bind(_on_host(name))
            self._servers[-1].listen(backlog)
        self._calls = selectors.DefaultSelector()
        for each in self._servers:
            each.setblocking(False)
            self._calls.register(each, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, tuple[bytearray, float]] = {}
        """Callers without a greeting, the oldest first: what they have said, and their limit."""
        self.address: Address = (host, server.getsockname()[1], token, name)

    def fileno(self) -> int:
        """What can be waited on for callers."""
        return self._calls.fileno()

    def accept(self, seconds: float = 0.0) -> list[tuple[int, socket.socket]]:
        """The callers that have greeted, with their numbers; waits so many seconds at most."""
        ready = [key.fileobj for key, _ in self._calls.select(seconds)]
        for server in self._servers:
            if server in ready:
                ready += self._answered(server)
        greeted = [
            (number, connection)
            for connection in ready
            if isinstance(connection, socket.socket)
            if (number := self._hear(connection)) is not None
        ]
        now = time.monotonic()
        for stranger in [each for each, (_, limit) in self._strangers.items() if limit < now]:
            self._drop(stranger)
        return greeted

    def _answered(self, server: socket.socket) -> list[socket.socket]:
        """New callers, some at a time, without those of other users."""
        found: list[socket.socket] = []
        try:
            for _ in range(_STRANGERS // 2):
                connection = server.accept()[0]
                if len(self._strangers) >= _STRANGERS:
                    self._drop(next(iter(self._strangers)))
                if not _is_own_user(connection):
                    connection.close()
                    continue
                connection.setblocking(False)
                self._strangers[connection] = bytearray(), time.monotonic() + _GREETING_SECONDS
                self._calls.register(connection, selectors.EVENT_READ)
                found.append(connection)
        except (BlockingIOError, ConnectionError):
            pass  # that was the last, or a caller has gone
        except OSError:  # no more files, or no memory
            for stranger in list(self._strangers):
                self._drop(stranger)
            time.sleep(_BREATH)
        return found

    def _hear(self, caller: socket.socket) -> int | None:
        """Read what a caller says; its number, if that is a greeting."""
        if caller not in self._strangers:
            return None  # a server, or dropped
        said, size = self._strangers[caller][0], _TOKEN + _NUMBER
        try:
            data = caller.recv(size - len(said))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        said += data
        if data and len(said) < size:
            return None
        if not secrets.compare_digest(bytes(said[:_TOKEN]), self._token) or len(said) < size:
            self._drop(caller)
            return None
        self._calls.unregister(caller)
        del self._strangers[caller]
        return int.from_bytes(said[_TOKEN:], "little")

    def _drop(self, caller: socket.socket) -> None:
        del self._strangers[caller]
        self._calls.unregister(caller)
        caller.close()

    def close(self) -> None:
        """Listen no more; in a forked process, the sockets of its parent stay open."""
        for each in (*self._servers, *self._strangers):
            each.close()
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def call(address: Address, number: int, seconds: float) -> socket.socket:
    """Connect with a listener, and greet it."""
    host, port, token, name = address
    connection = _reached(name, seconds) or socket.create_connection((host, port), seconds)
    try:
        connection.sendall(token.encode() + number.to_bytes(_NUMBER, "little"))
    except BaseException:
        connection.close()
        raise
    return connection


def _reached(name: str, seconds: float) -> socket.socket | None:
    """A connection with a listener of the same user on this host; None if there is none."""
    if name and sys.platform == "linux":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(seconds)
        with suppress(OSError):
            connection.connect(_on_host(name))
            if _is_own_user(connection):
                return connection
        connection.close()
    return None


def _is_own_user(connection: socket.socket) -> bool:
    """Whether the other end is of the same user; over TCP that cannot be known."""
    if connection.family != socket.AF_UNIX:
        return True
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", said)
    return user == os.geteuid()


def _on_host(name: str) -> str:
    """The address of a name: the null byte keeps it out of the file system."""
    return f"\0taktline-{name}"
