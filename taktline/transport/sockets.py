"""Sockets between the processes of a job: the address of a process, and who may connect to it.

A process has one listening socket. A caller begins with a greeting: the listener's token, what the
socket is for, and the caller's number. Callers are served side by side: one that says nothing keeps
nobody else waiting, and is gone after some seconds. Only so many may be without a greeting at a
time; one more drops the oldest of them.

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
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
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
_GREETING_SECONDS = 5.0
"""How long a caller may take for its greeting."""
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
    """A listening socket; to be used in a ``with`` block, or closed.

    >>> with Listener("127.0.0.1") as listener:
    ...     caller = call(listener.address, CONTROL, 3, 5.0)
    ...     [found] = listener.accept(5.0)
    >>> found.number
    3
    >>> caller.close(), found.socket.close()
    (None, None)
    """

    def __init__(self, host: str) -> None:
        family, *_, at = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        token, name = secrets.token_hex(_TOKEN // 2), ""
        self._token = token.encode()
        server = socket.create_server(at, family=family, backlog=2 * _STRANGERS)
        self._servers = [server]
        if sys.platform == "linux":
            name = secrets.token_hex(16)
            self._servers.append(socket.socket(socket.AF_UNIX))
            self._servers[-1].bind(_on_host(name))
            self._servers[-1].listen(2 * _STRANGERS)
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

    def accept(self, seconds: float = 0.0) -> list[Caller]:
        """The callers that have greeted; waits so many seconds at most."""
        ready = [key.fileobj for key, _ in self._calls.select(seconds)]
        for server in self._servers:
            if server in ready:
                ready += self._answered(server)
        found = [self._heard(each) for each in ready if isinstance(each, socket.socket)]
        now = time.monotonic()
        for stranger in [each for each, (_, limit) in self._strangers.items() if limit < now]:
            self._drop(stranger)
        return [caller for caller in found if caller is not None]

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

    def _heard(self, connection: socket.socket) -> Caller | None:
        """Read what a caller says; who it is, if that is a greeting."""
        if connection not in self._strangers:
            return None  # a server, or dropped
        said = self._strangers[connection][0]
        try:
            data = connection.recv(_GREETING - len(said))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        said += data
        if data and len(said) < _GREETING:
            return None
        if len(said) < _GREETING or not secrets.compare_digest(bytes(said[:_TOKEN]), self._token):
            self._drop(connection)
            return None
        self._calls.unregister(connection)
        del self._strangers[connection]
        purpose, number = bytes(said[_TOKEN:-_NUMBER]), int.from_bytes(said[-_NUMBER:], "little")
        return Caller(purpose, number, connection)

    def _drop(self, caller: socket.socket) -> None:
        del self._strangers[caller]
        self._calls.unregister(caller)
        caller.close()

    def close(self) -> None:
        """Listen no more; in a forked process, the sockets of its parent stay open."""
        for each in (*self._servers, *self._strangers):
            each.close()
        self._calls.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def call(address: Address, purpose: bytes, number: int, seconds: float) -> socket.socket:
    """Connect with a listener, and greet it."""
    host, port, token, name = address
    connection = _reached(name, seconds) or socket.create_connection((host, port), seconds)
    try:
        connection.sendall(token.encode() + purpose + number.to_bytes(_NUMBER, "little"))
    except BaseException:
        connection.close()
        raise
    return connection


def ready(connection: socket.socket) -> socket.socket:
    """A connection for messages, which does not block."""
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
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
    return _peer(connection)[1] == os.geteuid()


def pid_of(connection: socket.socket) -> int:
    """The process at the other end, if that is on this host; 0 if it cannot be known."""
    if sys.platform != "linux" or connection.family != socket.AF_UNIX:
        return 0
    return _peer(connection)[0]


def _peer(connection: socket.socket) -> tuple[int, ...]:
    """The process, the user and the group at the other end."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", said)


def _on_host(name: str) -> str:
    """The address of a name: the null byte keeps it out of the file system."""
    return f"\0taktline-{name}"


def own_host(store: Store) -> str:
    """The address under which other hosts reach this one: that of the way to the store.

    It goes over the interface in GLOO_SOCKET_IFNAME, if that has such a way.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    for over in [interface, ""] if interface else [""]:
        for host, port in hosts_of(store):
            if found := next(_ways(host, port, over), None):
                return found
    return "127.0.0.1" if _can_listen("127.0.0.1") else "::1"


def hosts_of(store: Store) -> Iterator[tuple[str, int]]:
    """Where the store is, and the master, which the store may not name."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store  # pyright: ignore[reportAttributeAccessIssue]
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if isinstance(host, str) and isinstance(port, int):
        yield host, port
    master, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if master and port.isdecimal():
        yield master, int(port)


def _ways(host: str, port: int, interface: str) -> Iterator[str]:
    """This host's address on the way to another one, over an interface, if one is named."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, UnicodeError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            if interface:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
            probe.connect(socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0][4])
            yield probe.getsockname()[0]  # nothing was sent


def _can_listen(host: str) -> bool:
    with suppress(OSError), socket.create_server((host, 0)):
        return True
    return False
