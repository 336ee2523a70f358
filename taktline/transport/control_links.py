"""The sockets of the control plane: one to each neighbour of a process.

The processes are a ring with chords. The neighbours of a process are those 1, 2, 4, … places before
and after it: at most twice as many as the number of processes has binary digits. A message gets
from any process to any other in about half as many hops, and the ring holds together unless all
neighbours of a process are gone.

Neighbours find each other's addresses in the store, once. Of two processes the one with the higher
number calls the other. A socket that ends while its process lives is replaced.

All this is done in rounds, in which a process calls the missing ones, or sees whether they listen.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from taktline.checks import read
from taktline.errors import JsonError, LostRankError
from taktline.transport.control_messages import Item, Link, encode
from taktline.transport.listener import ADDRESS, Address, Listener, call
from taktline.transport.own_host import own_host

_CONNECT_SECONDS = 0.5
_FIRST_PAUSE, _PAUSE = 0.02, 0.25
"""The pause between two rounds: short at first, when all processes are about to come."""
_REFUSED_SECONDS = 0.25
"""How long a process that was never connected refuses calls before it counts as ended."""
_PROBES = 12
"""How often a process that does not call is tried: it may be stopped."""


def neighbours(process: int, size: int) -> list[int]:
    """The processes to which one of so many has sockets.

    >>> neighbours(0, 4), neighbours(0, 8), len(neighbours(0, 1024))
    ([1, 2, 3], [1, 2, 4, 6, 7], 19)
    """
    ways = [1 << digit for digit in range((size - 1).bit_length())]
    return sorted({(process + sign * way) % size for way in ways for sign in (1, -1)})


def nearest(target: int, among: Sequence[int], process: int, size: int) -> int | None:
    """Which process is the next on the way to another one; None if none of them is nearer to it.

    >>> nearest(5, [1, 2, 4, 12, 14, 15], 0, 16), nearest(5, [14, 15], 0, 16)
    (4, None)
    """

    def distance(other: int) -> int:
        return min((target - other) % size, (other - target) % size)

    found = min(among, key=distance, default=process)
    return found if distance(found) < distance(process) else None


def require_alive(store: Store) -> None:
    """Raise unless the store answers: to connect to one that is gone takes its whole timeout."""
    try:
        store.check([""])
    except RuntimeError as error:
        raise LostRankError(
            "rank 0 is lost: the store of the process group, which it or a launcher keeps, "
            "does not answer. Look at the output of both; restart all ranks",
            peer=0,
        ) from error


class Network:
    """How a process reaches others: by sockets. A simulation has another network."""

    threaded = True
    """Whether a thread serves the sockets."""
    now = staticmethod(time.monotonic)

    def selector(self) -> Any:
        """What waits for sockets."""
        return selectors.DefaultSelector()

    def pair(self) -> tuple[Any, Any]:
        """Two connected sockets in this process."""
        return socket.socketpair()

    def listen(self, host: str, callers: int) -> Any:
        """A listener that expects so many callers."""
        return Listener(host, callers)

    def call(self, address: Address, process: int) -> Any:
        """A socket to another process, which is told the number of this one."""
        return call(address, process, _CONNECT_SECONDS)

    def probe(self, address: Address) -> None:
        """Raise unless somebody listens at an address."""
        socket.create_connection(address[:2], _CONNECT_SECONDS).close()


class Links:
    """A socket to each neighbour; used on the control thread, but for :meth:`wake`.

    Args:
        store: where the processes find each other's addresses, under ``name``.
        process: the number of this process, of ``size``.
        network: how others are reached.
        here: the processes that have come, as far as is known.
        news: returns all news, for a neighbour that has just connected.
        linked: called when a neighbour has connected, and has been greeted.
        take: called with each message: its sender, kind and body.
        part: called when a process has ended, with whether it has said goodbye.
    """

    def __init__(
        self,
        store: Store,
        process: int,
        size: int,
        name: str,
        network: Network,
        here: Collection[int],
        *,
        news: Callable[[], list[Item]],
        linked: Callable[[int], None],
        take: Callable[[int, str, Any], None],
        part: Callable[[int, bool], None],
    ) -> None:
        self._process, self.neighbours = process, neighbours(process, size)
        self._network, self._here = network, here
        self._news, self._linked, self._take, self._part = news, linked, take, part
        require_alive(store)
        # A connection of its own, for another thread.
        own = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._store = PrefixStore(name, own)
        self.host = own_host(store)
        """The address under which other hosts reach this one."""
        self._listener = network.listen(self.host, len(self.neighbours))
        self._selector = network.selector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        reader, self._waker = network.pair()
        self._waker.setblocking(False)
        self._selector.register(reader, selectors.EVENT_READ, lambda: reader.recv(4096))
        self._links: dict[int, Link] = {}
        self._addresses: dict[int, Address] = {}
        self._missing = {*self.neighbours}
        """The neighbours that are not connected, and not known to have ended."""
        self._calling: set[int] = set()
        """The neighbours that were called and have not answered."""
        self._probed: Counter[int] = Counter()
        self._refused: dict[int, float] = {}
        """Since when neighbours refuse calls."""
        self._met: set[int] = set()
        """The neighbours that have been connected."""
        self._rounds = 0
        self.due = 0.0
        """When to call :meth:`look` next."""
        self._store.set(str(process), json.dumps(self._listener.address))

    @property
    def connected(self) -> list[int]:
        """The neighbours that are connected."""
        return list(self._links)

    def look(self) -> None:
        """Call the neighbours that can be found by now, and see which have ended."""
        now = self._network.now()
        if now >= self.due:
            self._call_missing()
            self._rounds += 1
            pause = _FIRST_PAUSE * self._rounds if self._missing else _PAUSE
            self.due = now + min(pause, _PAUSE)

    def wait(self, seconds: float) -> None:
        """Wait until something arrives, or :meth:`wake` is called, and take it."""
        for key, _ in self._selector.select(seconds):
            key.data()
        self._accept()  # also to drop callers that say nothing

    def wake(self) -> None:
        """End the wait; from any thread."""
        with suppress(OSError):
            self._waker.send(b"\0")

    def write(self, process: int, data: bytes) -> None:
        """Send a message, if the neighbour is connected."""
        link = self._links.get(process)
        if link is not None and not link.write(data):
            self._lose(link)

    def close(self) -> None:
        """Close all sockets; in a forked process, those of its parent stay open."""
        for key in list((self._selector.get_map() or {}).values()):
            if key.fileobj is not self._listener:
                key.fileobj.close()
        self._selector.close()
        self._listener.close()
        self._waker.close()

    def forget(self) -> None:
        """Remove the address from the store, where later groups of this process meet, too."""
        with suppress(RuntimeError):  # the store may be gone
            self._store.delete_key(str(self._process))

    def _call_missing(self) -> None:
        try:
            for process in sorted(self._missing - self._calling):
                if process in self._addresses or self._look_up(process):
                    self._try(process)
        except (RuntimeError, JsonError) as error:  # nobody else can be found
            unknown = self._missing - self._addresses.keys()
            self._missing -= unknown
            far = 0 not in {self._process, *self.neighbours, *self._here}
            if (0 in unknown or far) and isinstance(error, RuntimeError):
                self._part(0, False)  # the store is gone, and with it the process that kept it
        until = self._network.now() - _REFUSED_SECONDS
        for process in sorted(self._refused, key=self._refused.__getitem__):
            if process in self._missing and self._refused[process] < until:
                self._end(process)

    def _look_up(self, process: int) -> bool:
        """Whether the store has the address of a process."""
        if not self._store.check([str(process)]):
            return False
        record = self._store.get(str(process))
        self._addresses[process] = read(record, ADDRESS, what="an address")
        return True

    def _try(self, process: int) -> None:
        """Call a process, or see whether it lives."""
        now = self._network.now()
        if not self._addresses[process][1]:  # it has ended, see leave_word
            # Before any that has left since, perhaps because of this one.
            self._refused.setdefault(process, now - _REFUSED_SECONDS / 2)
            del self._addresses[process]  # perhaps that of an earlier process
            return
        if process > self._process and self._probed[process] >= _PROBES:
            return
        self._probed[process] += 1
        try:
            self._reach(process)
        except (OSError, OverflowError, ValueError) as error:  # the latter: no address at all
            if process in self._met:
                self._end(process)
            elif isinstance(error, ConnectionRefusedError):
                self._refused.setdefault(process, now)
                del self._addresses[process]  # perhaps that of an earlier process

    def _reach(self, process: int) -> None:
        """Call a process with a lower number; see whether one with a higher number listens.

        A process listens as long as it lives, even while it is stopped, and will call this one.
        """
        address = self._addresses[process]
        if process > self._process:
            self._network.probe(address)
            return
        link = Link(self._network.call(address, self._process), process)
        self._calling.add(process)
        self._register(link)

    def _accept(self) -> None:
        for process, connection in self._listener.accept():
            if process not in self.neighbours:
                connection.close()
                continue
            link = Link(connection, process)
            self._register(link)
            self._add(link)

    def _register(self, link: Link) -> None:
        self._selector.register(link.socket, selectors.EVENT_READ, lambda: self._read(link))

    def _read(self, link: Link) -> None:
        messages = link.read()
        if messages is None:
            self._lose(link)
            return
        if link.answered and self._links.get(link.process) is not link:
            self._add(link)
        for kind, body in messages:
            if kind == "goodbye":
                link.said_goodbye = True
            elif kind == "hello":
                # Kept, as the store may be gone when this process has to be called.
                self._addresses[link.process], items = body
                self._take(link.process, "news", items)
            else:
                self._take(link.process, kind, body)

    def _add(self, link: Link) -> None:
        """Note a neighbour that has called, or has answered."""
        process = link.process
        self._missing.discard(process)
        self._met.add(process)
        self._calling.discard(process)
        self._refused.pop(process, None)
        if (before := self._links.get(process)) is not None:
            self._drop(before)  # the other process has noticed first that this socket has ended
        self._links[process] = link
        self.write(process, encode("hello", (self._listener.address, self._news())))
        self._linked(process)

    def _drop(self, link: Link) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.socket.close()

    def _lose(self, link: Link) -> None:
        """Let go of a socket that has ended: with its process, or alone."""
        self._drop(link)
        process = link.process
        self._calling.discard(process)
        if self._links.get(process) is not link:
            return
        del self._links[process]
        if link.said_goodbye:
            self._part(process, True)
        else:
            self._missing.add(process)
            self._probed[process] = 0
            self.due = 0.0

    def _end(self, process: int) -> None:
        """Note that a process has ended without a goodbye."""
        self._missing.discard(process)
        self._part(process, False)
