"""Sockets between the processes of a job: the address of a process, and who may connect to it.

A process has one listening socket. A caller begins with a greeting, in one piece: the listener's
token, what the socket is for, and the caller's number. Nobody waits for a caller that says nothing:
only so many may be without a greeting at a time, and one more drops the oldest of them.

On Linux a listener also has a name, at which processes on the same host reach it without TCP, in
less of the kernel's time. All users can see that name, so only processes of the same user are let
in there.
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
from hashlib import blake2b
from itertools import product
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

Address = tuple[str, int, str, str]
ADDRESS = (str, int, str, str)
"""Host, port, the token without which a caller is refused, and the name on the host or ""."""
NOWHERE: Address = ("", 0, "", "")
"""The address of a process that has ended."""

_TOKEN, _PURPOSE, _NUMBER = 32, 16, 4
"""Bytes of the parts of a greeting."""
_GREETING = _TOKEN + _PURPOSE + _NUMBER
_STRANGERS = 128
"""How many callers may be without a greeting at a time."""
_BREATH = 0.05
"""Seconds until callers are taken again after the system has refused one: it has no room."""
_ROOM = 1 << 22
"""The bytes that a connection on one host has room for, if the kernel allows it, as TCP has."""


class Caller(NamedTuple):
    """Who has greeted, and what for."""

    purpose: bytes
    number: int
    socket: socket.socket


def purpose_of(text: str) -> bytes:
    """What a socket is for, as a greeting has it."""
    return blake2b(text.encode(), digest_size=_PURPOSE).digest()


CONTROL = purpose_of("control")
"""The purpose of a socket of the control plane."""


class Listener:
    """A listening socket.

    >>> listener = Listener("127.0.0.1")
    >>> caller = call(listener.address, CONTROL, 3, 5.0)
    >>> found = [*listener.accept(5.0), *listener.accept(5.0)]  # it comes, and greets
    >>> found[0].number
    3
    >>> caller.close(), found[0].socket.close(), listener.close()
    (None, None, None)
    """

    def __init__(self, host: str) -> None:
        family, *_, at = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        token, name = secrets.token_hex(_TOKEN // 2), ""
        self._token = token.encode()
        self._servers = [socket.create_server(at, family=family, backlog=2 * _STRANGERS)]
        if sys.platform == "linux":
            name = secrets.token_hex(16)
            self._servers.append(socket.socket(socket.AF_UNIX))
            self._servers[-1].bind(_on_host(name))
            self._servers[-1].listen(2 * _STRANGERS)
        self._calls = selectors.DefaultSelector()
        for each in self._servers:
            each.setblocking(False)
            self._calls.register(each, selectors.EVENT_READ, self._let_in)
        self._strangers: dict[socket.socket, None] = {}
        """Callers without a greeting, the oldest first."""
        self.address: Address = (host, self._servers[0].getsockname()[1], token, name)

    def fileno(self) -> int:
        """What can be waited on for callers."""
        return self._calls.fileno()

    def accept(self, seconds: float = 0.0) -> list[Caller]:
        """Callers that have greeted, if any; waits so many seconds at most for any caller."""
        return [
            caller
            for key, _ in self._calls.select(seconds)
            if (caller := key.data(key.fileobj)) is not None
        ]

    def _let_in(self, server: socket.socket) -> None:
        """Take a new caller, unless it is of another user."""
        try:
            caller = server.accept()[0]
        except (BlockingIOError, ConnectionError):
            return  # it has gone
        except OSError:  # no more files, or no memory
            time.sleep(_BREATH)
            return
        if not _is_own_user(caller):
            caller.close()
            return
        if len(self._strangers) >= _STRANGERS:
            self._forget(next(iter(self._strangers))).close()
        _make_ready(caller)
        self._strangers[caller] = None
        self._calls.register(caller, selectors.EVENT_READ, self._hear)

    def _hear(self, stranger: socket.socket) -> Caller | None:
        """Who a caller is, if it has said a greeting; otherwise it is dropped."""
        if stranger not in self._strangers:
            return None  # dropped just now
        said = b""
        with suppress(OSError):
            said = self._forget(stranger).recv(_GREETING)
        if len(said) < _GREETING or not secrets.compare_digest(said[:_TOKEN], self._token):
            stranger.close()
            return None
        number = int.from_bytes(said[-_NUMBER:], "little")
        return Caller(said[_TOKEN:-_NUMBER], number, stranger)

    def _forget(self, stranger: socket.socket) -> socket.socket:
        del self._strangers[stranger]
        self._calls.unregister(stranger)
        return stranger

    def close(self) -> None:
        """Listen no more; in a forked process, the sockets of its parent stay open."""
        for each in (*self._servers, *self._strangers):
            each.close()
        self._calls.close()


def call(address: Address, purpose: bytes, number: int, seconds: float) -> socket.socket:
    """Connect with a listener, and greet it; the connection does not block."""
    host, port, token, name = address
    connection = _reached(name, seconds) or socket.create_connection((host, port), seconds)
    try:
        connection.sendall(token.encode() + purpose + number.to_bytes(_NUMBER, "little"))
        _make_ready(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _make_ready(connection: socket.socket) -> None:
    """Prepare a connection for messages: it does not block."""
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)


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
    return struct.unpack("3i", said)[1] == os.geteuid()


def _on_host(name: str) -> str:
    """The address of a name: the null byte keeps it out of the file system."""
    return f"\0taktline-{name}"


def own_host(store: Store) -> str:
    """The address under which other hosts reach this one: that of the way to the store.

    It goes over the interface in GLOO_SOCKET_IFNAME, if that has such a way.
    """
    place, ways = place_of(store), []
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].encode()
    with suppress(OSError, UnicodeError):  # nothing has that name
        ways = sorted(socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)) if place else []
    for over, (family, *_, at) in product([interface, b""], ways):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            if over:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, over)
            probe.connect(at)  # which sends nothing
            return probe.getsockname()[0]
    return "127.0.0.1"


def place_of(store: Store | None) -> tuple[str, int] | None:
    """The host and the port of a store, or of the master, if it has none."""
    while store is not None and hasattr(store, "underlying_store"):
        store = store.underlying_store  # pyright: ignore[reportAttributeAccessIssue]
    host = getattr(store, "host", None) or os.environ.get("MASTER_ADDR")
    port = getattr(store, "port", None) or os.environ.get("MASTER_PORT", "")
    return (host, int(port)) if host and str(port).isdecimal() else None
