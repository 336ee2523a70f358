"""The sockets of the control plane: one to each neighbour of a process.

The processes are a ring with chords. The neighbours of a process are those 1, 2, 4, … places before
and after it: at most twice as many as the number of processes has binary digits. News get from any
process to any other in about half as many hops, and the ring holds together unless all neighbours
of a process are gone.

Neighbours find each other's addresses in the store, once. Of two processes the one with the higher
number calls the other. A socket that ends while its process lives is replaced.

All this is done in rounds, in which a process calls the missing ones, or sees whether they listen.
"""

from __future__ import annotations

import json
import math
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from taktline.checks import read
from taktline.errors import JsonError, LostRankError
from taktline.transport.news import ENDED, LENGTH, LOST, decode, encode
from taktline.transport.sockets import (
    ADDRESS,
    CONTROL,
    Address,
    Caller,
    Listener,
    call,
    own_host,
    ready,
)

_CONNECT_SECONDS = 0.5
_FIRST_PAUSE, _PAUSE = 0.02, 0.25
"""The pause between two rounds: short at first, when all processes are about to come."""
_REFUSED_SECONDS = 0.25
"""How long a process that was never connected refuses calls before it counts as ended."""
_PROBES = 12
"""How often a process that does not call is tried: it may be stopped."""
_MOST = 1 << 20
"""More bytes than a message has."""
_UNSENT = 1 << 22
"""How many unread bytes show that a neighbour does not listen any more."""


def neighbours(process: int, size: int) -> list[int]:
    """The processes to which one of so many has sockets.

    >>> neighbours(0, 4), neighbours(0, 8), len(neighbours(0, 1024))
    ([1, 2, 3], [1, 2, 4, 6, 7], 19)
    """
    ways = [1 << digit for digit in range((size - 1).bit_length())]
    return sorted({(process + sign * way) % size for way in ways for sign in (1, -1)})


class Network:
    """How a process reaches others: by sockets. A simulation has another network."""

    threaded = True
    """Whether a thread serves the sockets."""
    now = staticmethod(time.monotonic)
    selector: Any = selectors.DefaultSelector
    """What waits for sockets."""
    pair: Any = staticmethod(socket.socketpair)
    listen: Any = Listener

    def call(self, address: Address, process: int) -> Any:
        """A socket to another process, which hears the number of this one."""
        return ready(call(address, CONTROL, process, _CONNECT_SECONDS))

    def probe(self, address: Address) -> None:
        """Raise unless somebody listens at an address."""
        socket.create_connection(address[:2], _CONNECT_SECONDS).close()


class Link:
    """A non-blocking socket to a neighbour."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.said_goodbye = False
        self._unread = bytearray()
        self._unsent = bytearray()

    def write(self, data: bytes) -> None:
        """Send as much as there is room for; a reader notices if the socket has ended."""
        if len(self._unsent) < _UNSENT:
            self._unsent += data
        with suppress(OSError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]

    def read(self) -> list[bytes] | None:
        """The messages that have arrived; None if the socket has ended or sent anything else."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._unread += data
        found: list[bytes] = []
        while len(self._unread) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._unread)[0]
            if end > _MOST:
                return None
            if len(self._unread) < end:
                break
            found.append(bytes(self._unread[:end]))
            del self._unread[:end]
        return found


@dataclass(slots=True)
class _Neighbour:
    """What is known of a neighbour."""

    address: Address | None = None
    link: Link | None = None
    met: bool = False
    """Whether it has ever said anything."""
    gone: bool = False
    probes: int = 0
    refuses_since: float = math.inf


class Ring:
    """A socket to each neighbour, used on the control thread; :meth:`_write` on any thread.

    Args:
        store: where the processes find each other's addresses, under ``name``.
        process: the number of this process, of ``size``.
        network: how others are reached.
    """

    def __init__(
        self, store: Store, process: int, size: int, name: str, network: Network | None = None
    ) -> None:
        self.process = process
        self._network = network = network or Network()
        self._now = network.now
        self._lock = threading.RLock()
        """Held while anything is written, taken, or said to be gone."""
        self._known = {number: _Neighbour() for number in neighbours(process, size)}
        self._rounds = 0
        self._due = 0.0
        """When the next round is due."""
        self._listener = network.listen(own_host(store))
        self.address: Address = self._listener.address
        try:
            store.check([""])  # to connect to one that is gone takes its whole timeout
            # A connection of its own, for another thread.
            own = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
            self._store = PrefixStore(name, own)
            self._store.set(str(process), json.dumps(self.address))
        except RuntimeError as error:
            self._listener.close()
            raise LostRankError(
                "rank 0 is lost: the store of the process group, which it or a launcher keeps, "
                "does not answer. Look at the output of both; restart all ranks",
                peer=0,
            ) from error
        self._selector = network.selector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        reader, self._waker = network.pair()
        self._selector.register(reader, selectors.EVENT_READ, lambda: reader.recv(4096))

    # What a plane does with what arrives.

    def _take(self, source: int, kind: str, body: Any, data: bytes) -> None:
        """Take a message of a neighbour."""
        raise NotImplementedError

    def _keep(self, caller: Caller) -> None:
        """Take a caller that does not belong to the control plane."""
        raise NotImplementedError

    def _note_gone(self, process: int, how: str) -> None:
        """Note that a process is not there any more, and why."""
        raise NotImplementedError

    def _lasting(self) -> bytes:
        """All that a neighbour has to know that has just connected."""
        raise NotImplementedError

    # Rounds.

    @property
    def connected(self) -> list[int]:
        """The neighbours that are connected."""
        return [process for process, near in self._known.items() if near.link is not None]

    @property
    def missing(self) -> list[int]:
        """The neighbours that are not connected, and not known to have ended."""
        return [p for p, near in self._known.items() if near.link is None and not near.gone]

    def _look(self) -> None:
        """Call the neighbours that can be found by now, and see which have ended."""
        now = self._now()
        if now < self._due:
            return
        for process in self.missing:
            self._look_for(process, self._known[process])
        late = [p for p in self.missing if self._known[p].refuses_since < now - _REFUSED_SECONDS]
        for process in sorted(late, key=lambda p: self._known[p].refuses_since):
            self._end(process)
        self._rounds += 1
        pause = _FIRST_PAUSE * self._rounds if self.missing else _PAUSE
        self._due = now + min(pause, _PAUSE)

    def _look_for(self, process: int, near: _Neighbour) -> None:
        """Call a process, or see whether it lives."""
        if process > self.process and near.probes >= _PROBES:
            return
        try:
            if near.address is None and self._store.check([str(process)]):
                near.address = read(self._store.get(str(process)), ADDRESS, what="an address")
        except (RuntimeError, JsonError) as error:  # it cannot be found any more
            near.gone = True
            # The process that kept the store is gone, too, unless it is known to live.
            if isinstance(error, RuntimeError) and not self._has_come(0):
                with self._lock:
                    self._note_gone(0, LOST)
        if near.address is None:
            return
        now = self._now()
        if not near.address[1]:  # it has ended, see leave_word
            # Before any that has left since, perhaps because of this one.
            near.refuses_since = min(near.refuses_since, now - _REFUSED_SECONDS / 2)
            near.address = None  # perhaps that of an earlier process
            return
        near.probes += 1
        try:
            self._reach(process, near, near.address)
        except (OSError, OverflowError, ValueError) as error:  # the latter: no address at all
            if near.met:
                self._end(process)
            elif isinstance(error, ConnectionRefusedError):
                near.refuses_since = min(near.refuses_since, now)
                near.address = None  # perhaps that of an earlier process

    def _has_come(self, process: int) -> bool:
        """Whether a process has come, as far as is known."""
        raise NotImplementedError

    def _reach(self, process: int, near: _Neighbour, address: Address) -> None:
        """Call a process with a lower number; see whether one with a higher number listens.

        A process listens as long as it lives, even while it is stopped, and will call this one.
        """
        if process > self.process:
            self._network.probe(address)
        else:
            connection = self._network.call(address, self.process)
            with self._lock:
                self._connect(process, near, connection)

    def _end(self, process: int) -> None:
        """Note that a process has ended without a goodbye."""
        self._known[process].gone = True
        with self._lock:
            self._note_gone(process, LOST)

    # Sockets. What follows is called with the lock.

    def _wait(self, seconds: float) -> None:
        """Wait until something arrives, or :meth:`_wake` is called, and take it."""
        found = self._selector.select(seconds)
        with self._lock:
            for key, _ in found:
                key.data()
            self._accept()  # also to drop callers that say nothing

    def _wake(self) -> None:
        """End the wait; from any thread."""
        with suppress(OSError):
            self._waker.send(b"\0")

    def _write(self, process: int, data: bytes) -> None:
        """Send a message, if the neighbour is connected."""
        if link := self._known[process].link:
            link.write(data)

    def _accept(self) -> None:
        for caller in self._listener.accept():
            near = self._known.get(caller.number)
            if caller.purpose != CONTROL:
                self._keep(caller)
            elif near is None:
                caller.socket.close()
            else:
                near.met = True
                self._connect(caller.number, near, ready(caller.socket))

    def _connect(self, process: int, near: _Neighbour, connection: socket.socket) -> None:
        """Note the socket of a neighbour, and greet it."""
        if near.link is not None:
            self._drop(near.link)  # the other process has noticed first that this one has ended
        near.link = link = Link(connection)
        near.probes, near.refuses_since = 0, math.inf
        self._selector.register(
            connection, selectors.EVENT_READ, lambda: self._read(process, near, link)
        )
        link.write(encode("hello", self.address) + self._lasting())

    def _read(self, process: int, near: _Neighbour, link: Link) -> None:
        try:
            messages = link.read()
            for data in messages or ():
                kind, body = decode(data[LENGTH.size :])
                near.met = True
                if kind == "goodbye":
                    link.said_goodbye = True
                elif kind == "hello":
                    near.address = body  # the store may be gone when it has to be called
                else:
                    self._take(process, kind, body, data)
        except JsonError:
            messages = None
        if messages is None:
            self._lose(process, near, link)

    def _drop(self, link: Link) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.socket.close()

    def _lose(self, process: int, near: _Neighbour, link: Link) -> None:
        """Let go of a socket that has ended: with its process, or alone."""
        self._drop(link)
        if near.link is not link:
            return
        near.link = None
        if link.said_goodbye:
            near.gone = True
            self._note_gone(process, ENDED)
        elif near.met:
            self._due = 0.0
        else:
            near.address = None  # perhaps that of an earlier process

    def _close_sockets(self) -> None:
        """Close all sockets; in a forked process, those of its parent stay open."""
        for key in list((self._selector.get_map() or {}).values()):
            if key.fileobj is not self._listener:
                key.fileobj.close()
        self._selector.close()
        self._listener.close()
        self._waker.close()
