"""The sockets of the control plane: one to each neighbour of a process, on which facts travel.

The processes are a ring with chords. The neighbours of a process are those 1, 2, 4, … places before
and after it: at most twice as many as the number of processes has binary digits. A fact gets from
any process to any other in about half as many hops, and the ring holds together unless all
neighbours of a process are gone.

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
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from taktline.checks import read
from taktline.errors import JsonError, LostRankError
from taktline.transport.news import ENDED, LENGTH, LOST, News, decode, encode
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
_FACTS, _WAITING = 1 << 13, 1 << 8
"""How many facts and waiting callers are remembered."""


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
        self._unread = bytearray()
        self._unsent = bytearray()

    def write(self, data: bytes) -> None:
        """Send as much as there is room for; a reader notices if the socket has ended."""
        if len(self._unsent) < _UNSENT:
            self._unsent += data
        with suppress(OSError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]

    def read(self) -> list[bytes]:
        """The messages that have arrived; an OSError if the socket has ended or sent rubbish."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the socket has ended")
        self._unread += data
        found: list[bytes] = []
        while len(self._unread) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._unread)[0]
            if end > _MOST:
                raise OSError("no message is so long")
            if len(self._unread) < end:
                break
            found.append(bytes(self._unread[:end]))
            del self._unread[:end]
        return found


@dataclass(slots=True)
class _Neighbour:
    """What is known of a neighbour."""

    address: Address | None = None
    """Where it is called, as it has said itself: then it was met."""
    link: Link | None = None
    probes: int = 0
    refuses_since: float = math.inf


class Ring:
    """The sockets of one process, used on the control thread; :meth:`send` on any thread.

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
        self.news = News(process, self._now)
        self._lock = threading.Condition()
        """Held while anything is written or learned; notified of all that is learned."""
        self._near = {number: _Neighbour() for number in neighbours(process, size)}
        self.addresses: dict[int, Address] = {}
        """Where processes are called, as they have said when they came."""
        self._facts: OrderedDict[bytes, None] = OrderedDict()
        """The facts that are known, for neighbours that connect later."""
        self._fresh: list[tuple[bytes, int]] = []
        """What is to be passed on, and who has sent it."""
        self._callers: OrderedDict[tuple[bytes, int], Caller] = OrderedDict()
        """Processes that have called for a group, until this process takes the socket."""
        self._rounds = 0
        self._due = 0.0
        """When the next round is due."""
        self._listener = network.listen(own_host(store))
        self.address: Address = self._listener.address
        try:
            store.check([""])  # to connect to one that is gone takes its whole timeout
            # A connection of its own, for another thread.
            own = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
            self._store: Store | None = PrefixStore(name, own)
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

    def _learn(self, kind: str, body: Any) -> bool:
        """Learn of a fact or a state; returns whether others have to know it, too."""
        raise NotImplementedError

    # Rounds.

    @property
    def connected(self) -> list[int]:
        """The neighbours that are connected."""
        return [process for process, near in self._near.items() if near.link is not None]

    @property
    def missing(self) -> list[int]:
        """The neighbours that are not connected, and not known to have ended."""
        near = self._near.items()
        return [p for p, each in near if each.link is None and p not in self.news.gone]

    def _look(self) -> None:
        """Call the neighbours that can be found by now, and see which have ended."""
        now = self._now()
        if now < self._due:
            return
        for process in self.missing:
            self._look_for(process, self._near[process])
        for process in sorted(self.missing, key=lambda p: self._near[p].refuses_since):
            if self._near[process].refuses_since < now - _REFUSED_SECONDS:
                self._note_gone(process, LOST)
        self._rounds += 1
        pause = _FIRST_PAUSE * self._rounds if self.missing else _PAUSE
        self._due = now + min(pause, _PAUSE)

    def _look_for(self, process: int, near: _Neighbour) -> None:
        """Call a process with a lower number; see whether one with a higher number listens.

        A process listens as long as it lives, even while it is stopped, and will call this one.
        """
        calls = process < self.process
        address = near.address or self._published(process)
        if address is None or not (calls or near.probes < _PROBES):
            return
        near.probes += 1
        try:
            if calls:
                connection = self._network.call(address, self.process)
                with self._lock:
                    self._connect(process, near, connection)
            else:
                self._network.probe(address)
        except (OSError, OverflowError, ValueError) as error:  # the latter: no address at all
            if isinstance(error, ConnectionRefusedError):
                self.news.refused.add(process)
            if near.address is not None or not address[1]:  # it has ended, see leave_word
                self._note_gone(process, LOST)
            elif isinstance(error, ConnectionRefusedError):  # or that is an earlier process's
                near.refuses_since = min(near.refuses_since, self._now())

    def _published(self, process: int) -> Address | None:
        """The address that a process has left in the store, if it can be found there."""
        try:
            if self._store is not None and self._store.check([str(process)]):
                return read(self._store.get(str(process)), ADDRESS, what="an address")
        except JsonError:
            pass  # it may be written anew
        except RuntimeError:
            self._store = None
            # The process that kept the store is gone, too, unless it is known to live.
            if 0 not in self.news.here:
                self._note_gone(0, LOST)
        return None

    def rewire(self, members: Sequence[int]) -> None:
        """Be a ring of these processes from now on; the others are left behind."""
        place, size = members.index(self.process), len(members)
        with self._lock:
            near = [members[number] for number in neighbours(place, size)]
            new = {p: _Neighbour(self.addresses.get(p)) for p in near if p not in self._near}
            self._near = {**self._near, **new}  # another thread may go through the old one
            for process, each in self._near.items():
                if process not in members:
                    self.news.gone.setdefault(process, LOST)
                    if each.link is not None:
                        self._drop(each.link)
                        each.link = None
            self.news.forget(members)
            self._due = 0.0
        self._wake()

    # News. What follows is called with the lock.

    def send(self, kind: str, *body: Any) -> None:
        """Send a fact, or the state of this process; the kernel has it when this returns."""
        with self._lock:
            self._take(self.process, encode(kind, *body))
            self._spread()

    def _take(self, source: int, message: bytes) -> None:
        """Take a message of a neighbour, or of this process, to be passed on if it is new."""
        if message in self._facts:
            return
        kind, body = decode(message)
        if kind == "hello":
            self._near[source].address = body  # the store may be gone when it has to be called
        elif self._learn(kind, body):
            self._fresh.append((message, source))
            self._lock.notify_all()
            if kind != "state":
                self._facts[message] = None
                trim(self._facts, _FACTS)

    def _spread(self) -> None:
        """Send the neighbours what has come since the last time."""
        fresh, self._fresh = self._fresh, []
        for process in self.connected if fresh else ():
            self._write(process, b"".join(data for data, source in fresh if source != process))

    def _note_gone(self, process: int, how: str) -> None:
        """Send word that a process is not there any more, and why."""
        if self.news.gone.get(process) not in (how, ENDED):
            self.send("gone", process, how)

    # Sockets. What follows is called with the lock, too, but for the wait.

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
        """Send data, if the neighbour is connected."""
        if link := self._near[process].link:
            link.write(data)

    def _accept(self) -> None:
        for caller in self._listener.accept():
            near, key = self._near.get(caller.number), (caller.purpose, caller.number)
            if caller.purpose != CONTROL:
                dropped = self._callers.pop(key, None)
                self._callers[key] = caller
                if len(self._callers) > _WAITING:
                    _, dropped = self._callers.popitem(last=False)
                self._lock.notify_all()
            else:
                dropped = caller if near is None else None
                if near is not None:
                    self._connect(caller.number, near, ready(caller.socket))
            if dropped is not None:
                dropped.socket.close()

    def _connect(self, process: int, near: _Neighbour, connection: socket.socket) -> None:
        """Note the socket of a neighbour, and greet it."""
        if near.link is not None:
            self._drop(near.link)  # the other process has noticed first that this one has ended
        near.link = link = Link(connection)
        near.probes, near.refuses_since = 0, math.inf
        self._selector.register(
            connection, selectors.EVENT_READ, lambda: self._read(process, near, link)
        )
        state = encode("state", *self.news.own())
        link.write(b"".join([encode("hello", *self.address), state, *self._facts]))

    def _read(self, process: int, near: _Neighbour, link: Link) -> None:
        try:
            for message in link.read():
                self._take(process, message)
        except (OSError, JsonError):
            self._drop(link)
            if near.link is link:
                near.link = None
                if near.address is not None:
                    self._due = 0.0

    def _drop(self, link: Link) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.socket.close()

    def _close_sockets(self) -> None:
        """Close all sockets; in a forked process, those of its parent stay open."""
        for key in list((self._selector.get_map() or {}).values()):
            if key.fileobj is not self._listener:
                key.fileobj.close()
        self._selector.close()
        self._listener.close()
        self._waker.close()


def trim(known: OrderedDict[Any, Any], most: int) -> None:
    """Forget the oldest."""
    while len(known) > most:
        known.popitem(last=False)
