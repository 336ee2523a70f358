"""The control plane: what processes tell each other apart from data, so that news never waits.

Every process has a socket to every other one, and a thread that minds them. The store is asked for
addresses once, while the processes meet, and never again: its host may be the one that is gone.

::

    process 0 ───────── process 1      beat      "I am alive, and doing this", twice a second
        │  ╲           ╱  │            verdict   "this process is lost", to all that it concerns
        │     ╲     ╱     │            goodbye   before a program ends in order
    process 2 ───────── process 3

A socket that ends without a goodbye means that its process has died: all others know at once.
"""

from __future__ import annotations

import atexit
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch.distributed as dist

from taktline.errors import text_of
from taktline.transport.meeting import Meeting, Message, Peer
from taktline.transport.verdict import Cause, Verdict

__all__ = ["Heard", "Member", "Plane", "Watched"]

TICK_SECONDS = 0.25
BEAT_SECONDS = 2 * TICK_SECONDS
SILENT_SECONDS = 4 * BEAT_SECONDS
"""After how long without a beat a process counts as silent."""
GRACE_SECONDS = 0.1
"""How long what is under way may still arrive once a process is lost: a program may just end."""
_CHECKS = (0.0, 0.3, 1.0)
"""How many seconds after its socket has ended it is looked whether a process lives."""
_SENDING_SECONDS = 1.0
_LONGEST = 50_000
"""So many characters of a report fit into a message."""

_log = logging.getLogger("taktline")
_planes: WeakKeyDictionary[dist.ProcessGroup, Plane] = WeakKeyDictionary()


class Heard(NamedTuple):
    """What another process has said last."""

    age: float
    """How long ago, in seconds."""
    state: str
    busy: bool
    """Whether it is in a step."""


class Member:
    """What has to know of a verdict: something that works with a group of processes.

    Args:
        processes: the group.
        leave: called once, on the plane's thread, so that whoever waits for the group leaves.
    """

    def __init__(self, processes: Sequence[int], leave: Callable[[Verdict], None]) -> None:
        self.processes = list(processes)
        self.leave = leave
        self.verdict: Verdict | None = None
        self.told = threading.Event()
        """Set once there is a verdict."""
        self.place = ""
        """Where its processes meet again."""
        self.absent: set[int] = set()
        """Those of them who have not come there yet."""


class Watched(Protocol):
    """A step that is running."""

    def tick(self) -> None:
        """Look at it; called some times a second."""
        ...

    def signalled(self, signals: bytes) -> None:
        """Hear of signals, by their numbers."""
        ...


class Plane:
    """The sockets of this process to all others of the job, and the thread that minds them."""

    def __init__(self, meeting: Meeting) -> None:
        self.process = meeting.process
        self.state: Callable[[], tuple[str, bool]] = lambda: ("is not in a step", False)
        """What this process is doing, and whether that is a step."""
        self.watched: tuple[Watched, ...] = ()
        """The steps that are running."""
        self._meeting = meeting
        self._peers: dict[int, Peer] = {}
        self._heard: dict[int, tuple[float, str, bool]] = {}
        self._gone: dict[int, str] = {}
        self._mine: dict[str, str] = {}
        """What this process says of itself, by the place that it is for."""
        self._values: dict[int, dict[str, str]] = {}
        """The same of other processes, until they leave in the middle."""
        self._checks: list[tuple[float, int]] = []
        """When to look again whether processes live whose sockets have ended."""
        self._calling: set[int] = set()
        self._known: set[int] = set()
        """The numbers of verdicts."""
        self._members: WeakSet[Member] = WeakSet()
        self._due: list[tuple[float, Verdict, int]] = []
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._outgoing: list[tuple[Message, Collection[int], threading.Event]] = []
        self._selector = selectors.DefaultSelector()
        self._wake_end, self.wake_fd = _pipe()
        self._closing = self._forgotten = False
        self._selector.register(self._wake_end, selectors.EVENT_READ, self._woken)
        self._selector.register(meeting.server, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._run, name="taktline control", daemon=True)
        self._thread.start()

    @classmethod
    def current(cls) -> Plane | None:
        """The plane of the default process group, made once; None if there is none."""
        group = dist.distributed_c10d._get_default_group()
        if group.size() == 1:
            return None
        plane = _planes.get(group)
        if plane is None or plane._meeting.pid != os.getpid():  # a fork has no thread
            store = dist.distributed_c10d._get_default_store()
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            name = f"taktline/control/{restart}"
            plane = _planes[group] = cls(Meeting(store, group.rank(), group.size(), name))
            finalize(group, plane.forget).atexit = False
        return plane

    def join(self, member: Member, *, again_at: str = "") -> None:
        """Let a member know of verdicts from now on.

        Args:
            again_at: the place where processes meet that have left each other before. What one of
                them says until it comes there is about the time before.
        """
        with self._lock:
            self._members.add(member)
            member.place = again_at
            if again_at:
                here = {p for p, values in self._values.items() if again_at in values}
                member.absent = set(member.processes) - here - {self.process}

    def leave(self, member: Member) -> None:
        """Let it know of none any more."""
        with self._lock:
            self._members.discard(member)

    @property
    def host(self) -> str:
        """The address under which other hosts reach this one."""
        return self._meeting.host

    def tell(self, processes: Collection[int], place: str, value: str) -> None:
        """Tell processes something that they will look for at a place."""
        # Until it is on its way, so that who connects later is told once, too.
        self._send(Message("value", state=place, value=value), processes).wait(_SENDING_SECONDS)

    def gather(
        self, member: Member, processes: Collection[int], place: str, seconds: float
    ) -> dict[int, str]:
        """What each of some processes tells at a place; some are missing if it ends early.

        That is after so many seconds, if the member has a verdict, or if one of them is gone.
        """
        wanted = set(processes) - {self.process}

        def found() -> dict[int, str]:
            told = {p: values[place] for p, values in self._values.items() if place in values}
            return {process: told[process] for process in wanted if process in told}

        def over() -> bool:
            return (
                member.verdict is not None
                or bool(wanted & {*self._gone})
                or len(found()) == len(wanted)
            )

        with self._lock:
            self._arrived.wait_for(over, seconds)
            values = found()
            mine = self._mine.pop(place, "")
            if len(values) == len(wanted):  # they are for this time only
                for process in wanted:
                    del self._values[process][place]
                values[self.process] = mine
            return values

    def heard(self, process: int) -> Heard | None:
        """What a process has said last; None if nothing."""
        said = self._heard.get(process)
        return None if said is None else Heard(time.monotonic() - said[0], *said[1:])

    def lives(self, process: int) -> bool:
        """Whether a process has been heard of just now."""
        said = self.heard(process)
        return process in self._peers and said is not None and said.age <= SILENT_SECONDS

    def gone(self, process: int) -> str | None:
        """Why a process is not there any more; None if it is."""
        return self._gone.get(process)

    def report(self, processes: Sequence[int]) -> str:
        """What each of some processes is doing, in a line each."""
        return "\n".join(f"  rank {process}: {self._told(process)}" for process in processes)

    def stalled(self, processes: Sequence[int], awaited: Collection[int], what: str) -> Verdict:
        """Who holds up a group: one that is silent, or computes, or is elsewhere.

        It may be in none of this process's groups: whoever waits for it holds up others. Of several
        it is one that is awaited here.
        """
        everyone = sorted({*self._peers, *self._meeting.present, *processes, self.process})
        others = [process for process in everyone if process != self.process]
        others.sort(key=lambda process: process not in awaited)
        heard = {process: self.heard(process) for process in others}
        signs: list[Callable[[Heard | None], bool]] = [
            lambda said: said is not None and said.age > SILENT_SECONDS,
            lambda said: said is not None and ": computes" in said.state,
            lambda said: said is not None and not said.busy,
            lambda said: said is None,
        ]
        suspects = [process for sign in signs for process in others if sign(heard[process])]
        suspects += others
        where = f"(rank {self.process} waits for {what})" if what else ""
        return Verdict(Cause.STALLED, suspects[0], self.report(everyone)[:_LONGEST], where)

    def _told(self, process: int) -> str:
        """What a process is doing, as far as it has said."""
        if process == self.process:
            return self.state()[0]
        if reason := self.gone(process):
            return f"{reason} (its process)"
        said = self.heard(process)
        if said is None:
            return "has not been heard of"
        if said.age <= SILENT_SECONDS:
            return said.state
        silence = f"not heard of for {said.age:.0f} seconds (stopped, or cut off)"
        return f"{silence}; then: {said.state}"

    def announce(self, verdict: Verdict) -> None:
        """Conclude something, and tell all whom it concerns, before this returns."""
        self._conclude(verdict, self.process)
        everyone = {p for member in self._all() for p in member.processes} - {self.process}
        # A process that is about to end has handed its news to the kernel by then.
        self._send(Message("verdict", verdict=verdict), everyone).wait(_SENDING_SECONDS)

    def forget(self) -> None:
        """Close it in a process that goes on."""
        self._forgotten = True
        self.close()

    def close(self) -> None:
        """Say goodbye, and end the thread."""
        if self._closing or self._meeting.pid != os.getpid():
            return
        if threading.current_thread() is self._thread:  # Python has collected a group there
            for process in list(self._peers):
                self._write(process, Message("goodbye"))
            self._closing = True
            return
        self._send(Message("goodbye"), list(self._peers)).wait(_SENDING_SECONDS)
        self._closing = True
        self.wake()
        self._thread.join(_SENDING_SECONDS)

    def wake(self) -> None:
        """Let the thread look at once."""
        with suppress(OSError):
            os.write(self.wake_fd, b"\0")

    def _raised(self, error: BaseException) -> None:
        """An error has ended this program."""
        text = f"{type(error).__name__}: {text_of(error, 2000)}"
        if any(member.verdict is None for member in self._all()):
            self.announce(Verdict(Cause.RAISED, self.process, text, "outside of a step"))

    def _send(self, message: Message, processes: Collection[int]) -> threading.Event:
        done = threading.Event()
        if not processes:
            done.set()
            return done
        with self._lock:
            self._outgoing.append((message, processes, done))
        self.wake()
        return done

    # What follows runs on the thread.

    def _run(self) -> None:
        tick = beat = call = 0.0
        while not self._closing:
            now = time.monotonic()
            if now >= tick:
                tick = now + TICK_SECONDS
                self._tick()
            if now >= beat:
                beat = now + BEAT_SECONDS
                self._beat()
            if now >= call:
                self._call()
                call = now + self._meeting.pause
            due = [tick, call, *(at for at, *_ in (*self._due, *self._checks))]
            for key, _ in self._selector.select(max(0.0, min(due) - time.monotonic())):
                key.data(key.fileobj)
            self._flush()
            self._pass_on()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        if self._forgotten:
            self._meeting.forget()
        os.close(self._wake_end)
        os.close(self.wake_fd)

    def _tick(self) -> None:
        for each in self.watched:
            try:
                each.tick()
            except Exception as error:  # what is told matters less than that this goes on
                _log.debug("the control plane could not look: %s", error)

    def _call(self) -> None:
        for peer in self._meeting.connect():
            self._register(peer)
        for process in self._meeting.dead():
            self._count_as_lost(process)

    def _beat(self) -> None:
        try:
            state, busy = self.state()
        except Exception as error:
            _log.debug("the control plane could not look: %s", error)
            return
        for process in list(self._peers):
            self._write(process, Message("beat", state=state[:2000], busy=busy))

    def _flush(self) -> None:
        with self._lock:
            outgoing, self._outgoing = self._outgoing, []
        for message, processes, done in outgoing:
            if message.kind == "value":
                with self._lock:
                    self._mine[message.state] = message.value
            for process in processes:
                self._write(process, message)
            done.set()

    def _write(self, process: int, message: Message) -> None:
        peer = self._peers.get(process)
        if peer is not None and not peer.write(message):
            self._lose(peer)

    def _woken(self, end: int) -> None:
        data = os.read(end, 4096)
        # What Python writes there is the number of a signal that the main thread may be deaf to.
        if any(data):
            for each in self.watched:
                each.signalled(data)

    def _accept(self, server: socket.socket) -> None:
        peer = self._meeting.accept()
        if peer is not None:
            self._register(peer)

    def _register(self, peer: Peer) -> None:
        self._selector.register(peer.socket, selectors.EVENT_READ, lambda _: self._read(peer))

    def _add(self, peer: Peer, process: int) -> None:
        """A peer that has said who it is, or has answered."""
        self._meeting.answered(process, peer)
        self._calling.discard(process)
        if (before := self._peers.get(process)) is not None:
            self._drop(before)  # it has noticed first that its socket has ended
        with self._lock:
            self._peers[process] = peer
            mine = list(self._mine.items())
        self._write(process, Message("beat", *self.state()))  # so that it knows, too
        for place, value in mine:
            self._write(process, Message("value", state=place, value=value))
        for verdict in {m.verdict: None for m in self._all() if process in m.processes}:
            if verdict is not None:
                self._write(process, Message("verdict", verdict=verdict))

    def _read(self, peer: Peer) -> None:
        messages = peer.read()
        process = peer.process
        if process is not None and peer.answered and self._peers.get(process) is not peer:
            self._add(peer, process)
        for message in messages or ():
            self._take(peer, message)
        if messages is None:
            self._lose(peer)

    def _take(self, peer: Peer, message: Message) -> None:
        process = peer.process
        if process is None:
            return
        match message.kind:
            case "beat":
                self._heard[process] = (time.monotonic(), message.state, message.busy)
            case "goodbye":
                peer.said_goodbye = True
            case "value":
                with self._lock:
                    self._values.setdefault(process, {})[message.state] = message.value
                    for member in self._members:
                        if member.place == message.state:
                            member.absent.discard(process)
                    self._arrived.notify_all()
            case _ if message.verdict is not None:
                with self._lock:
                    self._values.pop(process, None)  # it has left
                self._conclude(message.verdict, process)
            case _:
                pass

    def _drop(self, peer: Peer) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        peer.close()

    def _lose(self, peer: Peer) -> None:
        """A socket has ended: with its process, or alone."""
        self._drop(peer)
        process = peer.process
        if process is None:
            return
        self._meeting.unanswered(process)
        self._calling.discard(process)
        if self._peers.get(process) is not peer:
            return
        with self._lock:
            del self._peers[process]
            if peer.said_goodbye:
                self._gone[process] = "has ended"
                self._arrived.notify_all()
        if not peer.said_goodbye and not self._closing:
            now = time.monotonic()
            self._checks += [(now + seconds, process) for seconds in _CHECKS]

    def _check(self, process: int) -> None:
        """See whether a process lives whose socket has ended, and connect to it again."""
        if process in self._peers or process in self._gone or process in self._calling:
            return
        if process > self.process:
            lives = self._meeting.lives(process)  # then it will call
        elif lives := (peer := self._meeting.call(process)) is not None:
            self._calling.add(process)
            self._register(peer)
        if not lives:
            self._count_as_lost(process)

    def _count_as_lost(self, process: int) -> None:
        with self._lock:
            self._gone[process] = "is lost"
            self._arrived.notify_all()
        verdict = Verdict(Cause.LOST, process)
        self._due.append((time.monotonic() + GRACE_SECONDS, verdict, process))

    def _pass_on(self) -> None:
        """Conclude what is due, and tell the others of it."""
        now = time.monotonic()
        for check in [each for each in self._checks if each[0] <= now]:
            self._checks.remove(check)
            self._check(check[1])
        due = [each for each in self._due if each[0] <= now]
        self._due = [each for each in self._due if each[0] > now]
        for _, verdict, source in due:
            self._conclude(verdict, source)

    def _conclude(self, verdict: Verdict, source: int) -> None:
        """Let all members leave if a verdict concerns one, and pass it on to their groups.

        All of them: whoever has lost a replica, say, will not come to its pipeline either.
        """
        members = self._all()
        if verdict.number in self._known:
            return  # it has been concluded, and these may be new connections
        if not any(self._touches(member, verdict, source) for member in members):
            return
        self._known.add(verdict.number)
        told: set[int] = set()
        for member in members:
            if member.verdict is None and source not in member.absent:
                member.verdict = verdict
                told.update(member.processes)
                try:
                    member.leave(verdict)
                except Exception as error:  # the others must leave all the same
                    _log.debug("could not leave a group: %s", error)
                member.told.set()
        with self._lock:
            self._arrived.notify_all()
        told -= {self.process, source, verdict.process if verdict.cause == Cause.LOST else source}
        if told and source != self.process:
            self._send(Message("verdict", verdict=verdict), told)

    def _all(self) -> list[Member]:
        with self._lock:
            return list(self._members)

    def _touches(self, member: Member, verdict: Verdict, source: int) -> bool:
        named = verdict.process in member.processes or source in member.processes
        return named and source not in member.absent


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write


def _close_all() -> None:
    """At the end of the program; a process of multiprocessing may end by an error here."""
    error = sys.exc_info()[1]
    for plane in list(_planes.values()):
        if error is not None and not isinstance(error, SystemExit):
            plane._raised(error)
        plane.close()


def _forked() -> None:
    """In a process that was forked, such as a loader's: let go of sockets that are its parent's.

    As long as it held them, nobody would notice that its parent has died.
    """
    for plane in list(_planes.values()):
        for peer in plane._peers.values():
            peer.close()
        plane._meeting.close()


def _excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Tell the others that an error ends this program, and then do what is done otherwise."""
    for plane in list(_planes.values()):
        with suppress(Exception):
            plane._raised(error)
    _before(kind, error, trace)


_before = sys.excepthook
sys.excepthook = _excepthook
atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
# A process of multiprocessing ends without what atexit has.
Finalize(None, _close_all, exitpriority=100)
