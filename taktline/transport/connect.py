"""Sockets between processes of a job: how they are connected, and how a process waits on them.

Each process listens, and tells the others its address with a token over the control plane. A caller
that does not know the token is refused.

On Linux it also listens at a name that only processes on the same host can reach. There messages go
without TCP, in less of the kernel's time.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Collection, Container, Sequence
from contextlib import suppress

from taktline.checks import read
from taktline.transport.control_plane import Plane
from taktline.transport.verdict import Member

_NUMBER = 4
"""Bytes of the number that a caller sends."""
_PATIENCE = 300e-6
"""For so many seconds a wait stays awake: waking a sleeper takes time, here and at the sender."""
_SLICE = 0.1
"""How many seconds a wait for a call lasts before it looks whether there is a verdict."""
_ROOM = 1 << 22
"""The bytes that a connection on one host has room for, if the kernel allows it, as TCP has."""


class PeerFailure(Exception):
    """Processes have not come, did not answer in time, or their connections have ended."""

    def __init__(self, processes: Sequence[int], timed_out: bool) -> None:
        super().__init__("no answer in time" if timed_out else "a connection has ended")
        self.processes = processes
        self.timed_out = timed_out


def connect(
    plane: Plane,
    member: Member,
    processes: Collection[int],
    place: str,
    seconds: float,
    *,
    peers: Collection[int],
    kinds: int = 1,
) -> dict[int, list[socket.socket]]:
    """The sockets between this process and its peers, one of each kind.

    All ``processes`` call this, with the same place. A verdict of the member ends the wait, which
    lasts so many seconds otherwise. Of two processes the one with the higher number calls the other
    one, and sends a number: its own, with the kind.
    """
    deadline = time.monotonic() + seconds
    wanted = [peer * kinds + kind for peer in peers for kind in range(kinds)]
    found: dict[int, socket.socket] = {}
    with Listener(plane.host, seconds, len(wanted)) as listener:
        plane.tell(processes, place, listener.address)
        addresses = plane.gather(member, processes, place, seconds)
        if absent := [process for process in processes if process not in addresses]:
            raise PeerFailure(absent, timed_out=time.monotonic() > deadline)
        try:
            for number in wanted:
                peer, kind = divmod(number, kinds)
                if peer < plane.process:
                    mine = plane.process * kinds + kind
                    found[number] = _called(peer, addresses[peer], mine, seconds)
            while missing := [number for number in wanted if number not in found]:
                if member.verdict is not None or time.monotonic() > deadline:
                    raise PeerFailure([missing[0] // kinds], timed_out=True)
                with suppress(TimeoutError):
                    number, found[number] = listener.accept(missing)
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
    return {peer: [found[peer * kinds + kind] for kind in range(kinds)] for peer in peers}


def _called(peer: int, address: str, number: int, seconds: float) -> socket.socket:
    try:
        return call(address, number, seconds)
    except OSError as error:
        raise PeerFailure([peer], timed_out=False) from error


class Listener:
    """A listening socket; to be used in a ``with`` block.

    >>> with Listener("127.0.0.1", 5.0) as listener:
    ...     caller = call(listener.address, 3, 5.0)
    ...     number, connection = listener.accept({3})
    >>> number
    3
    >>> caller.close(), connection.close()
    (None, None)
    """

    def __init__(self, host: str, seconds: float, callers: int = 16) -> None:
        """``seconds`` is the timeout of each wait."""
        self._token = secrets.token_hex(16)
        self._seconds = seconds
        backlog = max(callers, 16)
        self._servers = [socket.create_server((host, 0), backlog=backlog)]
        name = ""
        if sys.platform == "linux":
            name = secrets.token_hex(16)
            self._servers.append(socket.socket(socket.AF_UNIX))
            self._servers[-1].bind(_on_host(name))
            self._servers[-1].listen(backlog)
        self._calls = select.poll()
        for server in self._servers:
            server.setblocking(False)
            self._calls.register(server, select.POLLIN)
        port = self._servers[0].getsockname()[1]
        self.address = json.dumps((host, port, self._token, name))
        """Host, port, token, and the name on the host if it has one."""

    def accept(self, awaited: Container[int]) -> tuple[int, socket.socket]:
        """The next caller with one of the awaited numbers; raises ``TimeoutError``."""
        while True:
            ready = [number for number, _ in self._calls.poll(_SLICE * 1000)]
            server = next((each for each in self._servers if each.fileno() in ready), None)
            if server is None:
                raise TimeoutError
            try:
                connection = server.accept()[0]
            except BlockingIOError:  # the caller has gone
                continue
            connection.settimeout(self._seconds)
            hello, size = b"", len(self._token) + _NUMBER
            with suppress(OSError):
                while len(hello) < size and (data := connection.recv(size)):
                    hello += data
            token, number = hello[:-_NUMBER], int.from_bytes(hello[-_NUMBER:], "little")
            if secrets.compare_digest(token, self._token.encode()) and number in awaited:
                return number, _ready(connection)
            connection.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()


def call(address: str, number: int, seconds: float) -> socket.socket:
    """Connect with a listener, and send a number to it."""
    host, port, token, name = read(address, (str, int, str, str), what="an address")
    connection = _reached(name, seconds) or socket.create_connection((host, port), seconds)
    connection.sendall(token.encode() + number.to_bytes(_NUMBER, "little"))
    return _ready(connection)


def _reached(name: str, seconds: float) -> socket.socket | None:
    """A connection with a listener on this host; None if it is on another one."""
    if name and sys.platform == "linux":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(seconds)
        with suppress(OSError):
            connection.connect(_on_host(name))
            return connection
        connection.close()
    return None


def _on_host(name: str) -> str:
    """The address of a name: the null byte keeps it out of the file system."""
    return f"\0taktline-{name}"


def _ready(connection: socket.socket) -> socket.socket:
    """A connection for short messages, which does not block."""
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
    connection.setblocking(False)
    return connection


def events(poll: select.poll, seconds: float) -> list[tuple[int, int]]:
    """The next events on sockets; none once the time is over."""
    if hasattr(os, "sched_yield"):
        end = time.perf_counter() + _PATIENCE
        while time.perf_counter() < end:
            os.sched_yield()  # the other process may need this core
            if found := poll.poll(0):
                return found
    return poll.poll(seconds * 1000)
