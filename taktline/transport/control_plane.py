"""The control plane: news between processes that never wait for data.

The processes are a ring with chords. The neighbours of a process are those 1, 2, 4, … places before
and after it: at most twice as many as the number of processes has binary digits. A process has a
socket to each of them, and a thread that serves these sockets. What is new to it, it passes on to
all of them. So news get from any process to any other in about half as many hops, and no lost or
stopped one can keep them from the others, unless these are all neighbours of a process.

Neighbours find each other's addresses in the store. After that it is not asked: its host may be the
one that is gone. If a socket ends without a goodbye, and its process cannot be called any more, it
has died. A socket that ends while its process lives is replaced.

A group of processes meets at a place. It leaves the place for good when one of them fails, and may
meet again at another one, in its next round. So no news of an earlier round disturbs a later one.

If the thread itself fails, so does the job: without it no later fault would be known.
"""

from __future__ import annotations

import json
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet, finalize

from torch.distributed.distributed_c10d import PrefixStore, Store

from taktline.checks import read
from taktline.errors import JsonError, LostRankError, text_of
from taktline.transport.communicators import default_group
from taktline.transport.exit_hooks import planes, store_name
from taktline.transport.news import (
    ENDED,
    LENGTH,
    LOST,
    OUTSIDE,
    Cause,
    News,
    State,
    Verdict,
    decode,
    encode,
)
from taktline.transport.sockets import (
    ADDRESS,
    CONTROL,
    Address,
    Caller,
    Listener,
    call,
    own_host,
    purpose_of,
)

_TICK_SECONDS, _HURRY_SECONDS = 0.25, 0.05
"""How often running steps are looked at; the second while a member has a verdict."""
_LAPSE_SECONDS = 1.0
"""How late a look must be to show that this process was stopped itself."""
_CONNECT_SECONDS = 0.5
_FIRST_PAUSE, _PAUSE = 0.02, 0.25
"""The pause between two rounds of calls: short at first, when all processes are about to come."""
_GRACE_SECONDS = 0.15
"""How long word of a process whose socket has ended may take: it may just have ended in order."""
_REFUSED_SECONDS = 0.25
"""How long a process that was never connected refuses calls before it counts as ended."""
_GOODBYE_SECONDS = 1.0
_MOST = 1 << 20
"""More bytes than a message has."""
_UNSENT = 1 << 22
"""How many unread bytes show that a neighbour does not listen any more."""

_log = logging.getLogger("taktline")


class PeerFailure(Exception):
    """Processes have not come, did not answer in time, or their connections have ended."""

    def __init__(self, processes: Sequence[int], timed_out: bool) -> None:
        super().__init__("no answer in time" if timed_out else "a connection has ended")
        self.processes = processes
        self.timed_out = timed_out


class Member:
    """A group of processes of which this one is a part, and which leaves when it has a verdict.

    Args:
        processes: the group.
        name: the same on all of its processes, and on no other group.
        leave: called once a round, on any thread, to end every wait for the group.
    """

    def __init__(
        self, processes: Sequence[int], name: str, leave: Callable[[Verdict], None]
    ) -> None:
        self.processes = list(processes)
        self.name = name
        self.leave = leave
        self.round = -1
        """Grows each time the processes connect again."""
        self.verdict: Verdict | None = None
        self.heard = threading.Event()
        """Set once there is a verdict."""

    @property
    def place(self) -> str:
        """Where its processes meet, in this round."""
        return purpose_of(f"{self.name}/{self.round}").hex()


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
        return call(address, CONTROL, process, _CONNECT_SECONDS)


class Neighbour:
    """What is known of a neighbour, and the non-blocking socket to it."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.refuses_since = math.inf
        self._unread, self._unsent = bytearray(), bytearray()

    def connect(self, connection: socket.socket) -> None:
        """Use another socket from now on."""
        self.socket, self.refuses_since = connection, math.inf
        self._unread, self._unsent = bytearray(), bytearray()

    def write(self, data: bytes) -> None:
        """Send as much as there is room for; a reader notices if the socket has ended."""
        if len(self._unsent) < _UNSENT:
            self._unsent += data
        with suppress(OSError):
            while self._unsent and self.socket is not None:
                del self._unsent[: self.socket.send(self._unsent)]

    def read(self) -> list[bytes]:
        """The messages that have arrived; an OSError if the socket has ended or sent rubbish."""
        assert self.socket is not None
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


def neighbours(process: int, size: int) -> list[int]:
    """The processes to which one of so many has sockets.

    >>> neighbours(0, 4), neighbours(0, 8), len(neighbours(0, 1024))
    ([1, 2, 3], [1, 2, 4, 6, 7], 19)
    """
    ways = [1 << digit for digit in range((size - 1).bit_length())]
    return sorted({(process + sign * way) % size for way in ways for sign in (1, -1)})


class Plane:
    """The control plane of one process: its sockets, and the thread that serves them.

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
        self.news = News(process, size, self._now)
        self.watched: tuple[Any, ...] = ()
        """The steps that are running; ``tick()`` of each is called some times a second."""
        self.in_company = False
        """Whether pipelines of this process share their work: with replicas, or in parts."""
        self._pid = os.getpid()
        self._lock = threading.Condition()
        """Held while anything is written or learned; notified of all that is learned."""
        self._near = {number: Neighbour() for number in neighbours(process, size)}
        self._facts: dict[bytes, None] = {}
        """The facts that are known, for neighbours that connect later."""
        self._fresh: list[tuple[bytes, int]] = []
        """What is to be passed on, and who has sent it."""
        self._callers: dict[tuple[bytes, int], Caller] = {}
        """Processes that have called for a group, until this process takes the socket."""
        self._members: WeakSet[Member] = WeakSet()
        self._left: dict[str, Verdict] = {}
        """Why a process has left a place."""
        self._rounds = 0
        self._due, self._looked, self._told = 0.0, 0.0, self._now()
        """When to call others; when steps were looked at, and others told of this process."""
        self._closing = self._forgotten = False
        self._failure: Verdict | None = None
        """Why the thread has ended, unless it was closed."""
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
        self._thread = threading.Thread(target=self._run, name="taktline control", daemon=True)
        if network.threaded:
            self._thread.start()

    @classmethod
    def current(cls) -> Plane:
        """The plane of the default process group, made once."""
        group = default_group()
        plane = planes.get(group)
        if plane is None or plane._pid != os.getpid():  # a fork has no thread
            place = (group.rank(), group.size(), store_name())
            plane = planes[group] = cls(group.get_group_store(), *place)
            finalize(group, plane.forget).atexit = False
        return plane

    # Groups.

    def join(self, member: Member) -> None:
        """Tell a member of verdicts from now on; in its next round, if it was told before."""
        with self._lock:
            again, member.round = member.round >= 0, member.round + 1
            while again and member.place in self._left:
                member.round += 1
            member.verdict = None
            member.heard.clear()
            self._members.add(member)
            if verdict := self._failure or self._left.get(member.place):
                self._leave([member], verdict)

    def leave(self, member: Member) -> None:
        """Tell a member of no further verdicts."""
        with self._lock:
            self._members.discard(member)

    def connect(self, member: Member, process: int, what: str, seconds: float) -> socket.socket:
        """A socket to another process of a member, which calls this, too, with the same text.

        The wait ends with a :class:`PeerFailure` after so many seconds, if the member has a
        verdict, or if one of its processes is gone.
        """
        purpose, deadline = purpose_of(f"{member.place}/{what}"), self._now() + seconds
        key, calls, news = (purpose, process), process < self.process, self.news

        def comes() -> bool:
            return process in news.here if calls else key in self._callers

        def gone() -> list[int]:
            return [each for each in member.processes if each in news.gone]

        with self._lock:
            self.send("here", self.process, self.address)
            self._lock.wait_for(lambda: comes() or member.verdict is not None or gone(), seconds)
            if key in self._callers:
                return self._callers.pop(key).socket
            if not comes():
                raise PeerFailure(gone() or [process], timed_out=self._now() > deadline)
        try:
            return call(news.here[process], purpose, self.process, seconds)
        except OSError as error:
            raise PeerFailure([process], timed_out=False) from error

    # Verdicts.

    def announce(self, verdict: Verdict) -> None:
        """Leave all groups; before this returns, the kernel has what the neighbours are told."""
        with self._lock:
            self._conclude(verdict, [member.place for member in self._members])

    def raised(self, error: BaseException) -> None:
        """Announce that an error ends this program, unless all members have a verdict."""
        if self._pid == os.getpid():  # in a forked process, the lock may be held for good
            self.announce(self._raised(error, OUTSIDE))

    def _raised(self, error: BaseException, where: str) -> Verdict:
        text = f"{type(error).__name__}: {text_of(error, 2000)}"
        return Verdict(Cause.RAISED, self.process, text, where)

    def forget(self) -> None:
        """Close the plane in a process that goes on."""
        self._forgotten = True
        self.close()

    def close(self) -> None:
        """Say goodbye, and end the thread."""
        if self._closing or self._pid != os.getpid():
            return
        self.send("gone", self.process, ENDED)
        self._closing = True
        with suppress(OSError):
            self._waker.send(b"\0")
        if threading.current_thread() is not self._thread:  # Python may collect a group there
            self._thread.join(_GOODBYE_SECONDS)

    # The control thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self.turn()
        except BaseException as error:
            _log.critical("the control plane of rank %d has failed", self.process, exc_info=error)
            self._failure = self._raised(error, "in its control thread")
            with suppress(Exception):
                self.announce(self._failure)
        with self._lock:
            self.close_sockets()
        if self._forgotten and self._store is not None:
            # Later groups of this process meet in the store, too; it may be gone.
            with suppress(RuntimeError):
                self._store.delete_key(str(self.process))

    def turn(self) -> None:
        """One round: look at the steps, call and tell others, and wait for what arrives."""
        now = self._now()
        with self._lock:
            left = any(member.verdict is not None for member in self._members)
        pause = _HURRY_SECONDS if self.watched and left else _TICK_SECONDS
        late = now - self._looked - pause
        if late >= 0:
            was_stopped = self._looked and late > _LAPSE_SECONDS
            self._looked = now
            for each in () if was_stopped else self.watched:  # then first hear from the others
                try:
                    each.tick()
                except Exception as error:  # a failing look must not stop the control thread
                    _log.debug("the control plane could not look at a step: %s", error)
        if now >= self._due:
            self._look_for_others()
        if now >= self._told + self.news.period:
            self._told = now
            self.send("state", *self.news.own())
        due = min(self._looked + pause, self._due, self._told + self.news.period)
        self._wait(max(0.0, due - self._now()))

    def _wait(self, seconds: float) -> None:
        """Wait until something arrives, and take it."""
        found = self._selector.select(seconds)
        with self._lock:
            for key, _ in found:
                key.data()
            self._spread()

    # Rounds of calls.

    @property
    def connected(self) -> list[int]:
        """The neighbours that are connected."""
        return [process for process, near in self._near.items() if near.socket is not None]

    @property
    def missing(self) -> list[int]:
        """The neighbours that are not connected, and not known to have ended."""
        near = self._near.items()
        return [p for p, each in near if each.socket is None and p not in self.news.gone]

    def _look_for_others(self) -> None:
        """Call the neighbours that can be found by now, and see which have ended."""
        for process in self.missing:
            near = self._near[process]
            address = self.news.here.get(process) or self._published(process)
            if address is not None:
                self._call(process, near, address)
        self._rounds += 1
        pause = _FIRST_PAUSE * self._rounds if self.missing else _PAUSE
        self._due = self._now() + min(pause, _PAUSE)

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
                self.send("gone", 0, LOST)
        return None

    def _call(self, process: int, near: Neighbour, address: Address) -> None:
        """Connect with a process that is missing; if it refuses, it has ended."""
        try:
            connection = self._network.call(address, self.process)
        except (OSError, OverflowError, ValueError) as error:  # the latter: no address at all
            if isinstance(error, ConnectionRefusedError):  # or that is an earlier process's
                near.refuses_since = min(near.refuses_since, self._now())
            refuses = near.refuses_since < self._now() - _REFUSED_SECONDS
            if process in self.news.here or not address[1] or refuses:  # or has left word
                self.send("gone", process, LOST)
        else:
            with self._lock:
                self._connect(process, near, connection)

    # What follows is called with the lock.

    def _accept(self) -> None:
        for caller in self._listener.accept():
            near = self._near.get(caller.number)
            if caller.purpose != CONTROL:
                self._callers[caller.purpose, caller.number] = caller
                self._lock.notify_all()
            elif near is None or (near.socket is not None and caller.number < self.process):
                caller.socket.close()  # of two that have called each other, one call counts
            else:
                self._connect(caller.number, near, caller.socket)

    def _connect(self, process: int, near: Neighbour, connection: socket.socket) -> None:
        """Note the socket of a neighbour, and greet it."""
        if near.socket is not None:
            self._drop(near.socket)  # the other process has noticed first that this one has ended
        near.connect(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(process, near))
        near.write(b"".join([encode("hello", self.process, self.address), *self._facts]))

    def _read(self, process: int, near: Neighbour) -> None:
        if near.socket is None:
            return  # it was replaced just now, and has ended
        try:
            for message in near.read():
                self._take(process, message)
        except (OSError, JsonError):
            self._drop(near.socket)
            near.socket = None
            self._due = self._now() + _GRACE_SECONDS

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

    def close_sockets(self) -> None:
        """Close all sockets; in a forked process, those of its parent stay open."""
        for key in list((self._selector.get_map() or {}).values()):
            if key.fileobj is not self._listener:
                key.fileobj.close()
        for caller in self._callers.values():
            caller.socket.close()
        self._selector.close()
        self._listener.close()
        self._waker.close()

    def send(self, kind: str, *body: Any) -> None:
        """Send everyone a message, on any thread; the kernel has it when this returns."""
        with self._lock:
            self._take(self.process, encode(kind, *body))
            self._spread()

    def _take(self, source: int, message: bytes) -> None:
        """Take a message of a neighbour, or of this process, to be passed on if it is new."""
        if message in self._facts:
            return
        kind, body = decode(message)
        if kind == "hello":
            self.news.here[source] = body[1]
            return
        if kind == "state":
            if not self.news.note(State(*body)):
                return
        else:
            self._facts[message] = None
            self._learn(kind, body)
        self._fresh.append((message, source))
        self._lock.notify_all()

    def _spread(self) -> None:
        """Send the neighbours what has come since the last time."""
        fresh, self._fresh = self._fresh, []
        for process, near in self._near.items() if fresh else ():
            if near.socket is not None:
                near.write(b"".join(data for data, source in fresh if source != process))

    def _learn(self, kind: str, body: Any) -> None:
        """Learn of a fact."""
        if kind == "here":
            process, address = body
            self.news.here[process] = address
        elif kind == "left":
            verdict, places = body
            for place in places:
                self._left.setdefault(place, verdict)
            self._conclude(verdict, places)
        else:
            process, how = body
            if process != self.process and self.news.gone.get(process) != ENDED:
                self.news.gone[process] = how
                if how == LOST:
                    places = [m.place for m in self._members if process in m.processes]
                    self._conclude(Verdict(Cause.LOST, process), places)

    def _conclude(self, verdict: Verdict, places: Collection[str]) -> None:
        """If a verdict is about the place of one member, leave all of them, and tell their groups.

        All of them: a process that has lost a replica, say, does not come to its pipeline either.
        """
        leaving = [member for member in self._members if member.verdict is None]
        if any(member.place in places for member in leaving):
            self._leave(leaving, verdict)

    def _leave(self, members: Sequence[Member], verdict: Verdict) -> None:
        """Tell everyone that members have a verdict, and let them leave."""
        for member in members:
            member.verdict = verdict
        try:  # first the news: this process may end as soon as its members have left
            self.send("left", verdict, [member.place for member in members])
        finally:
            for member in members:
                try:
                    member.leave(verdict)
                except Exception as error:  # the others must leave all the same
                    _log.debug("could not leave a group: %s", error)
                member.heard.set()
            self._lock.notify_all()
