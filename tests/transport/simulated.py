"""The control plane of many processes in one thread: the same code, over sockets that are lists.

What is sent in one round arrives in the next one, a millisecond later. So the number of rounds
until everyone knows of something is the number of hops.
"""

from __future__ import annotations

import os
import selectors
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple, cast

from torch._C._distributed_c10d import HashStore

from taktline.transport.control_plane import Member, PeerFailure, Plane
from taktline.transport.links import Network
from taktline.transport.sockets import CONTROL, Address, Caller

HOP_SECONDS = 0.001
PIPELINE = 8
"""So many processes in a row are a group."""


class Key(NamedTuple):
    """What a selector returns of an object."""

    fileobj: Any
    data: Any


class Socket:
    """One end of a connection."""

    def __init__(self, network: Simulation) -> None:
        self.network = network
        self.selector: Selector | None = None
        self.other: Socket | None = None
        self.arrived: deque[bytes] = deque()
        self.closed = False

    def take(self, data: bytes) -> None:
        """Let data arrive; b"" if the other end is closed."""
        self.arrived.append(data)
        if self.selector is not None:
            self.selector.ready[self] = None

    def send(self, data: bytes | bytearray) -> int:
        assert self.other is not None
        if self.closed or self.other.closed:
            raise BrokenPipeError
        self.network.flying.append((self.other, bytes(data)))
        self.network.messages += 1
        return len(data)

    def recv(self, size: int) -> bytes:
        if not self.arrived:
            raise BlockingIOError
        data = self.arrived.popleft()
        if len(data) > size:
            self.arrived.appendleft(data[size:])
        if self.arrived:
            self.take(self.arrived.pop())  # there is more to be read
        return data[:size]

    def close(self) -> None:
        if not self.closed and self.other is not None:
            self.network.flying.append((self.other, b""))
        self.closed = True

    def setblocking(self, flag: bool) -> None:
        """It never blocks."""

    def setsockopt(self, *option: int) -> None:
        """It has no options."""

    family = None


class Waker(Socket):
    """Ends the wait of its own process, at once."""

    def send(self, data: bytes | bytearray) -> int:
        assert self.other is not None
        self.other.take(bytes(data))
        return len(data)


class Listener:
    """Where a process is called."""

    def __init__(self, network: Simulation, port: int) -> None:
        self.network = network
        self.address: Address = ("simulated", port, "token", "")
        self.selector: Selector | None = None
        self.calls: list[Caller] = []
        self.closed = False

    def take(self, call: Caller) -> None:
        self.calls.append(call)
        if self.selector is not None:
            self.selector.ready[self] = None

    def accept(self) -> list[Caller]:
        calls, self.calls = self.calls, []
        return calls

    def close(self) -> None:
        self.closed = True


class Selector:
    """What has arrived for one process, and until when it would wait for more."""

    def __init__(self, network: Simulation) -> None:
        self.network = network
        self.keys: dict[Any, Key] = {}
        self.ready: dict[Any, None] = {}
        self.wakes_at = 0.0

    def register(self, fileobj: Any, events: int, data: Any) -> None:
        assert events == selectors.EVENT_READ
        self.keys[fileobj] = Key(fileobj, data)
        fileobj.selector = self
        if getattr(fileobj, "arrived", None):
            self.ready[fileobj] = None

    def unregister(self, fileobj: Any) -> None:
        del self.keys[fileobj]
        self.ready.pop(fileobj, None)
        fileobj.selector = None

    def select(self, seconds: float) -> list[tuple[Key, int]]:
        self.wakes_at = self.network.time + seconds
        ready, self.ready = self.ready, {}
        return [(self.keys[each], selectors.EVENT_READ) for each in ready if each in self.keys]

    def get_map(self) -> dict[Any, Key]:
        return self.keys

    def close(self) -> None:
        self.keys = {}


class Simulation(Network):
    """A network without sockets, and the planes of so many processes on it."""

    threaded = False

    def __init__(self, size: int) -> None:
        self.time = 1.0
        self.messages = self.rounds = 0
        self.flying: list[tuple[Any, Any]] = []
        self.listeners: list[Listener] = []
        self.selectors: list[Selector] = []
        store = HashStore()
        self.planes = [Plane(store, process, size, "simulated", self) for process in range(size)]
        self.alive = {*range(size)}
        self.members = [self._join(process) for process in range(size)]

    def _join(self, process: int) -> Member:
        first = process - process % PIPELINE
        group = [p for p in range(first, first + PIPELINE) if p < len(self.planes)]
        member = Member(group, f"pipeline {first}", lambda _: None)
        self.planes[process].join(member)
        return member

    def now(self) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.time

    def selector(self) -> Selector:
        self.selectors.append(Selector(self))
        return self.selectors[-1]

    def pair(self) -> tuple[Socket, Waker]:
        reader, waker = Socket(self), Waker(self)
        waker.other = reader
        return reader, waker

    def listen(self, host: str) -> Listener:
        self.listeners.append(Listener(self, len(self.listeners) + 1))
        return self.listeners[-1]

    def call(self, address: Address, process: int) -> Socket:
        self.probe(address)
        here, there = Socket(self), Socket(self)
        here.other, there.other = there, here
        self.flying.append(
            (self.listeners[address[1] - 1], Caller(CONTROL, process, cast("Any", there)))
        )
        return here

    def probe(self, address: Address) -> None:
        if self.listeners[address[1] - 1].closed:
            raise ConnectionRefusedError(os.strerror(111))

    def round(self) -> None:
        """Let everything arrive that was sent before, or time pass until somebody wakes."""
        if not self.flying and not any(self.selectors[p].ready for p in self.alive):
            wakes = min(self.selectors[p].wakes_at for p in self.alive)
            self.time = max(self.time, wakes)
        else:
            self.time += HOP_SECONDS
        flying, self.flying = self.flying, []
        for receiver, data in flying:
            receiver.take(data)
        self.rounds += 1
        for process in sorted(self.alive):
            selector = self.selectors[process]
            if selector.ready or selector.wakes_at <= self.time:
                self.planes[process].turn()

    def run(self, until: Any, seconds: float = 10.0) -> int:
        """Let rounds pass until a condition holds; how many there were."""
        rounds, deadline = self.rounds, self.time + seconds
        while not until():
            assert self.time < deadline, "it takes too long"
            self.round()
        return self.rounds - rounds

    def connect(self) -> int:
        """Let all processes meet; how many rounds that took."""
        return self.run(lambda: not any(plane.missing for plane in self.planes))

    def come(self) -> int:
        """Let all processes come to their places; how many rounds pass until all know it."""
        for plane, member in zip(self.planes, self.members, strict=True):
            with suppress(PeerFailure):
                plane.meet(member, 0.0)
        return self.run(
            lambda: all(
                p._at(m.place).come.keys() == {*m.processes}
                for p, m in zip(self.planes, self.members, strict=True)
            )
        )

    def settle(self) -> None:
        """Let everything arrive that is under way, but no beat."""
        while self.flying:
            self.round()

    def kill(self, process: int) -> None:
        """End a process without a goodbye."""
        self.alive.discard(process)
        self.planes[process]._close_sockets()

    def hear_of(self, deaths: set[int]) -> tuple[int, float]:
        """The rounds and seconds until all others know that these processes are lost."""
        begun = self.time

        def known() -> bool:
            return all(deaths <= self.planes[process].news.gone.keys() for process in self.alive)

        return self.run(known), self.time - begun
