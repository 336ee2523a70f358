"""The sockets of the control plane: one to each neighbour of a process.

The processes are a ring with chords. The neighbours of a process are those 1, 2, 4, … places before
and after it: at most twice as many as the number of processes has binary digits. News get from any
process to any other in about half as many hops, and the ring holds together unless all neighbours
of a process are gone.

Neighbours find each other's addresses in the store, once. Of two processes the one with the higher
number calls the other. A socket that ends while its process lives is replaced.

All this is done in rounds, in which a process calls the missing ones, or sees whether they listen.

A message is a kind and a body, as JSON, with its length first::

    hello     the first message: where the sender can be called; then all news that it knows
    beat      what the sender is doing, twice a second
    goodbye   the last message of a program that ends in order

The others are news, which everyone has to know::

    gone      a process that is not there any more, and why
    ask       the question what all are doing
    state     what a process is doing
    verdict   why a process leaves its groups, and which one has said so
    at        that a process has come to a place, or has left it
"""

from __future__ import annotations

import json
import math
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from taktline.checks import Either, conform, read
from taktline.errors import JsonError, LostRankError
from taktline.transport.sockets import ADDRESS, CONTROL, Address, Caller, Listener, call, ready
from taktline.transport.verdict import Cause, Verdict

_CONNECT_SECONDS = 0.5
_FIRST_PAUSE, _PAUSE = 0.02, 0.25
"""The pause between two rounds: short at first, when all processes are about to come."""
_REFUSED_SECONDS = 0.25
"""How long a process that was never connected refuses calls before it counts as ended."""
_PROBES = 12
"""How often a process that does not call is tried: it may be stopped."""
_LENGTH = struct.Struct("<I")
_MOST = 1 << 20
"""More bytes than a message has."""
_UNSENT = 1 << 22
"""How many unread bytes show that a neighbour does not listen any more."""
_WHAT = "a message of the control plane"


class State(NamedTuple):
    """What a process has said that it is doing."""

    process: int
    number: int
    """How often it has said so."""
    age: float
    """How many seconds ago."""
    text: str
    busy: bool
    """Whether it is in a step."""


class At(NamedTuple):
    """That a process has come to a place, or has left it because of a verdict."""

    process: int
    number: int
    """Increases with each of the process."""
    place: str
    came: int
    """The number of its latest coming; 0 if it never came."""
    address: Address | None
    """Where it can be called; None if it has left."""
    verdict: int
    """The number of the verdict, if it has left."""


_SHAPES: dict[str, Any] = {
    "hello": ADDRESS,
    "beat": (int, int, float, str, bool),
    "goodbye": None,
    "gone": (int, str),
    "ask": int,
    "state": (int, int, float, str, bool),
    "verdict": (int, (str, int, str, str, str, int)),
    "at": (int, int, str, int, Either(None, ADDRESS), int),
}


def encode(kind: str, body: Any = None) -> bytes:
    """The bytes of a message, with their length first."""
    data = json.dumps([kind, body], default=astuple).encode()
    return _LENGTH.pack(len(data)) + data


def decode(data: bytes) -> tuple[str, Any]:
    """The kind and the body of a message; raises a :class:`JsonError` if it is none.

    >>> decode(encode("gone", (3, "is lost"))[4:])
    ('gone', (3, 'is lost'))
    """
    kind, body = read(data, (str, object), what=_WHAT)
    if kind not in _SHAPES:
        raise JsonError(_WHAT, f"no kind is {kind[:40]!r}")
    conform(body, _SHAPES[kind], what=_WHAT)
    if kind in ("beat", "state"):
        return kind, State(*body)
    if kind == "at":
        at = At(*body)
        return kind, at._replace(address=at.address and tuple(at.address))
    if kind == "verdict":
        cause, *rest = body[1]
        if cause not in list(Cause):
            raise JsonError(_WHAT, f"nothing is {cause[:40]!r}")
        return kind, (body[0], Verdict(Cause(cause), *rest))
    return kind, tuple(body) if isinstance(body, list) else body


def neighbours(process: int, size: int) -> list[int]:
    """The processes to which one of so many has sockets.

    >>> neighbours(0, 4), neighbours(0, 8), len(neighbours(0, 1024))
    ([1, 2, 3], [1, 2, 4, 6, 7], 19)
    """
    ways = [1 << digit for digit in range((size - 1).bit_length())]
    return sorted({(process + sign * way) % size for way in ways for sign in (1, -1)})


@contextmanager
def _answering() -> Iterator[None]:
    """Inside, the store is used; raises if it is gone."""
    try:
        yield
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

    def listen(self, host: str) -> Any:
        """A listener."""
        return Listener(host)

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

    def read(self) -> list[tuple[str, Any]] | None:
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
        found: list[tuple[str, Any]] = []
        try:
            while len(self._unread) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(self._unread)[0]
                if end > _MOST:
                    return None
                if len(self._unread) < end:
                    break
                found.append(decode(bytes(self._unread[_LENGTH.size : end])))
                del self._unread[:end]
        except JsonError:
            return None
        return found


@dataclass(slots=True)
class _Neighbour:
    """What is known of a neighbour."""

    address: Address | None = None
    link: Link | None = None
    """Its socket; None until it has answered a call."""
    called: bool = False
    """Whether it was called, and has not answered yet."""
    met: bool = False
    """Whether it has ever been connected."""
    gone: bool = False
    probes: int = 0
    refuses_since: float = math.inf


class Links:
    """A socket to each neighbour; used on the control thread, but for :meth:`write`.

    Args:
        store: where the processes find each other's addresses, under ``name``.
        process: the number of this process, of ``size``.
        network: how others are reached.
        lock: held while anything is written, taken, or said to be gone.
        here: the processes that have come, as far as is known.
        news: returns the messages of all news, for a neighbour that has just connected.
        take: called with each message: its sender, kind and body.
        arrived: called with each caller that does not belong to the control plane.
        gone: called when a process has ended, with whether it has said goodbye.
    """

    def __init__(
        self,
        store: Store,
        process: int,
        size: int,
        name: str,
        network: Network,
        host: str,
        lock: threading.RLock,
        here: Collection[int],
        *,
        news: Callable[[], bytes],
        take: Callable[[int, str, Any], None],
        arrived: Callable[[Caller], None],
        gone: Callable[[int, bool], None],
    ) -> None:
        self._process, self._network, self._lock, self._here = process, network, lock, here
        self._news, self._take, self._arrived, self._gone = news, take, arrived, gone
        self.neighbours = neighbours(process, size)
        self._known = {number: _Neighbour() for number in self.neighbours}
        with _answering():
            store.check([""])  # to connect to one that is gone takes its whole timeout
            # A connection of its own, for another thread.
            own = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
            self._store = PrefixStore(name, own)
        self._listener = network.listen(host)
        self.address: Address = self._listener.address
        self._selector = network.selector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        reader, self._waker = network.pair()
        self._selector.register(reader, selectors.EVENT_READ, lambda: reader.recv(4096))
        self._rounds = 0
        self.due = 0.0
        """When to call :meth:`look` next."""
        try:
            with _answering():
                self._store.set(str(process), json.dumps(self.address))
        except LostRankError:
            self.close()
            raise

    @property
    def connected(self) -> list[int]:
        """The neighbours that are connected."""
        return [process for process, near in self._known.items() if near.link is not None]

    @property
    def missing(self) -> list[int]:
        """The neighbours that are not connected, and not known to have ended."""
        return [p for p, near in self._known.items() if near.link is None and not near.gone]

    def look(self) -> None:
        """Call the neighbours that can be found by now, and see which have ended."""
        now = self._network.now()
        if now < self.due:
            return
        for process in self.missing:
            self._look_for(process, self._known[process])
        late = [p for p in self.missing if self._known[p].refuses_since < now - _REFUSED_SECONDS]
        for process in sorted(late, key=lambda p: self._known[p].refuses_since):
            self._end(process)
        self._rounds += 1
        pause = _FIRST_PAUSE * self._rounds if self.missing else _PAUSE
        self.due = now + min(pause, _PAUSE)

    def wait(self, seconds: float) -> None:
        """Wait until something arrives, or :meth:`wake` is called, and take it."""
        found = self._selector.select(seconds)
        with self._lock:
            for key, _ in found:
                key.data()
            self._accept()  # also to drop callers that say nothing

    def wake(self) -> None:
        """End the wait; from any thread."""
        with suppress(OSError):
            self._waker.send(b"\0")

    def write(self, process: int, data: bytes) -> None:
        """Send a message, if the neighbour is connected."""
        if link := self._known[process].link:
            link.write(data)

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

    def _look_for(self, process: int, near: _Neighbour) -> None:
        """Call a process, or see whether it lives."""
        if near.called or (process > self._process and near.probes >= _PROBES):
            return
        try:
            if near.address is None and self._store.check([str(process)]):
                near.address = read(self._store.get(str(process)), ADDRESS, what="an address")
        except (RuntimeError, JsonError) as error:  # it cannot be found any more
            near.gone = True
            if isinstance(error, RuntimeError):  # the store is gone
                self._gone_with_store()
        if near.address is None:
            return
        now = self._network.now()
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

    def _gone_with_store(self) -> None:
        """The process that kept the store is gone, too, unless it is known to live."""
        with self._lock:
            if 0 not in self._here:
                self._gone(0, False)

    def _reach(self, process: int, near: _Neighbour, address: Address) -> None:
        """Call a process with a lower number; see whether one with a higher number listens.

        A process listens as long as it lives, even while it is stopped, and will call this one.
        """
        if process > self._process:
            self._network.probe(address)
            return
        link = Link(self._network.call(address, self._process))
        near.called = True
        self._selector.register(
            link.socket, selectors.EVENT_READ, lambda: self._read(process, near, link)
        )

    def _accept(self) -> None:
        for caller in self._listener.accept():
            near = self._known.get(caller.number)
            if caller.purpose != CONTROL:
                self._arrived(caller)
            elif near is None:
                caller.socket.close()
            else:
                self._answer(caller, near)

    def _answer(self, caller: Caller, near: _Neighbour) -> None:
        link = Link(ready(caller.socket))
        self._selector.register(
            link.socket, selectors.EVENT_READ, lambda: self._read(caller.number, near, link)
        )
        self._connect(caller.number, near, link)

    def _read(self, process: int, near: _Neighbour, link: Link) -> None:
        messages = link.read()
        if messages is None:
            self._lose(process, near, link)
            return
        if messages and near.link is not link:  # it has answered
            self._connect(process, near, link)
        for kind, body in messages:
            if kind == "goodbye":
                link.said_goodbye = True
            elif kind == "hello":
                near.address = body  # the store may be gone when this process has to be called
            else:
                self._take(process, kind, body)

    def _connect(self, process: int, near: _Neighbour, link: Link) -> None:
        """Note a neighbour that has called, or has answered, and greet it."""
        if near.link is not None:
            self._drop(near.link)  # the other process has noticed first that this one has ended
        near.link, near.met, near.called = link, True, False
        near.probes, near.refuses_since = 0, math.inf
        link.write(encode("hello", self.address) + self._news())

    def _drop(self, link: Link) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.socket.close()

    def _lose(self, process: int, near: _Neighbour, link: Link) -> None:
        """Let go of a socket that has ended: with its process, or alone."""
        self._drop(link)
        near.called = False
        if near.link is not link:
            return
        near.link = None
        if link.said_goodbye:
            near.gone = True
            self._gone(process, True)
        else:
            self.due = 0.0

    def _end(self, process: int) -> None:
        """Note that a process has ended without a goodbye."""
        self._known[process].gone = True
        with self._lock:
            self._gone(process, False)
