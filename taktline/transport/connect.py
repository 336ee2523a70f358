"""Sockets between processes of a job: how they are connected, and how a process waits on them.

Each process listens, and tells the others its address over the control plane.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Collection, Sequence
from errno import ECONNABORTED, ECONNRESET

from taktline.checks import read
from taktline.transport.control_plane import Plane
from taktline.transport.listener import ADDRESS, Listener, call
from taktline.transport.verdict import Member

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


def was_cut_off(error: BaseException | None) -> bool:
    """Whether a connection has broken by itself: its other end has not hung up."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (ECONNRESET, ECONNABORTED):
            return True
        error = error.__cause__
    return False


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
    one, and greets with a number: its own, with the kind.
    """
    deadline = time.monotonic() + seconds
    wanted = [peer * kinds + kind for peer in peers for kind in range(kinds)]
    found: dict[int, socket.socket] = {}
    with Listener(plane.host, len(wanted), named=True) as listener:
        plane.tell(processes, place, json.dumps(listener.address))
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
                for number, connection in listener.accept(_SLICE):
                    if number in wanted and number not in found:
                        found[number] = _ready(connection)
                    else:
                        connection.close()
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
    return {peer: [found[peer * kinds + kind] for kind in range(kinds)] for peer in peers}


def _called(peer: int, address: str, number: int, seconds: float) -> socket.socket:
    try:
        return _ready(call(read(address, ADDRESS, what="an address"), number, seconds))
    except OSError as error:
        raise PeerFailure([peer], timed_out=False) from error


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
