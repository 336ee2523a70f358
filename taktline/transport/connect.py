"""How processes of a job connect: one waits at its door, others call, and show what they were told.

Whoever does not know the token of a door is not let in. And how they wait for each other.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import time
from collections.abc import Container
from contextlib import suppress

from taktline.checks import read

__all__ = ["Door", "call", "events"]

_NUMBER = 4
"""Bytes of the number that a caller says."""
_PATIENCE = 50e-6
"""For so many seconds who waits stays awake: to sleep and be woken takes about as long."""


class Door:
    """A listening socket; to be used in a ``with`` block.

    >>> with Door("127.0.0.1", 5.0) as door:
    ...     caller = call(door.address, 3, 5.0)
    ...     number, connection = door.accept({3})
    >>> number
    3
    >>> caller.close(), connection.close()
    (None, None)
    """

    def __init__(self, host: str, seconds: float, callers: int = 16) -> None:
        """``seconds`` is the timeout of each wait."""
        self._token = secrets.token_hex(16)
        self._seconds = seconds
        self._server = socket.create_server((host, 0), backlog=max(callers, 16))
        self.address = json.dumps((host, self._server.getsockname()[1], self._token))
        """What a caller needs to know."""

    def accept(self, awaited: Container[int], seconds: float = 0.1) -> tuple[int, socket.socket]:
        """The next caller with one of the awaited numbers; raises ``TimeoutError``."""
        self._server.settimeout(seconds)
        while True:
            connection = self._server.accept()[0]
            connection.settimeout(self._seconds)
            hello, size = b"", len(self._token) + _NUMBER
            with suppress(OSError):
                while len(hello) < size and (data := connection.recv(size)):
                    hello += data
            token, number = hello[:-_NUMBER], int.from_bytes(hello[-_NUMBER:], "little")
            if secrets.compare_digest(token, self._token.encode()) and number in awaited:
                return number, ready(connection)
            connection.close()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()


def call(address: str, number: int, seconds: float) -> socket.socket:
    """Connect with a door, as who has this number."""
    host, port, token = read(address, (str, int, str), what="an address")
    connection = socket.create_connection((host, port), seconds)
    connection.sendall(token.encode() + number.to_bytes(_NUMBER, "little"))
    return ready(connection)


def ready(connection: socket.socket) -> socket.socket:
    """A connection for short messages, on which nothing waits by itself."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    return connection


def events(poll: select.poll, seconds: float) -> list[tuple[int, int]]:
    """What happens on sockets; nothing once the time is over."""
    if hasattr(os, "sched_yield"):
        end = time.perf_counter() + _PATIENCE
        while time.perf_counter() < end:
            os.sched_yield()  # whoever is awaited may need this core
            if found := poll.poll(0):
                return found
    return poll.poll(seconds * 1000)
