"""The control plane: news between processes that never wait for data.

A process has a socket to each of its neighbours, and a thread that serves these sockets. The store
is asked for addresses only while the processes meet: later its host may be the one that is gone.

Everything that others must know is news for everyone. A process passes on what is new to it to all
of its neighbours. So no lost or stopped process can keep news from the others.

If a socket ends without a goodbye, its process has died. Its neighbours notice. They tell each
other what they do, twice a second; a process that has to know it of others asks everyone.

A group of processes meets at a place. It leaves the place for good when one of them fails, and may
meet again at another one, in its next round. So no news of an earlier round disturbs a later one.

If the thread itself fails, so does the job: without it no later fault would be known.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any
from weakref import WeakSet, finalize

from torch.distributed.distributed_c10d import Store

from taktline.errors import text_of
from taktline.transport.base import Watched
from taktline.transport.communicators import default_group
from taktline.transport.exit_hooks import planes, store_name
from taktline.transport.links import Network, Ring
from taktline.transport.news import ENDED, LOST, OUTSIDE, Cause, News, Verdict, encode
from taktline.transport.sockets import Address, Caller, call, purpose_of, ready

_TICK_SECONDS, _HURRY_SECONDS = 0.25, 0.05
"""How often running steps are looked at; the second while a member has a verdict."""
_BEAT_SECONDS = 2 * _TICK_SECONDS
_GRACE_SECONDS = 0.15
"""How long news of a lost process may still arrive: its program may just have ended in order."""
_LAPSE_SECONDS = 1.0
"""How late a look must be to show that this process was stopped itself."""
_GOODBYE_SECONDS = 1.0
_ANSWER_SECONDS = 1.0
"""How long to wait until processes have said what they do."""
_SAME_ANSWER_SECONDS = 0.25
"""For how long an answer serves whoever asks."""
_SEEN, _FACTS, _PLACES, _WAITING = 1 << 15, 1 << 13, 1 << 10, 1 << 8
"""How many news, facts, places, and waiting callers are remembered."""

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
        self.addresses: dict[int, Address] = {}
        """Where its processes are called, once they have met."""

        self.meeting = ""
        """What tells their latest meeting from all others; the same on each."""

    @property
    def place(self) -> str:
        """Where its processes meet, in this round."""
        return purpose_of(f"{self.name}/{self.round}").hex()


class Plane(Ring):
    """The control plane of one process: its sockets, and the thread that serves them.

    The store is where the processes of the job find each other, under ``name``.
    """

    def __init__(
        self, store: Store, process: int, size: int, name: str, network: Network | None = None
    ) -> None:
        super().__init__(store, process, size, name, network)
        self.news = News(process, self._now)
        self.watched: tuple[Watched, ...] = ()
        """The steps that are running."""
        self.in_company = False
        """Whether pipelines of this process share their work: with replicas, or in parts."""
        self._pid = os.getpid()
        self._changed = threading.Condition(self._lock)
        self._members: WeakSet[Member] = WeakSet()
        self._came: OrderedDict[str, dict[int, Address]] = OrderedDict()
        """By place: the processes that have come there."""
        self._left: OrderedDict[str, Verdict] = OrderedDict()
        """By place: why a process has left it."""
        self._lost: list[tuple[float, int]] = []  # processes, and when to conclude their loss
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        """The digests of the news that have come."""
        self._facts: OrderedDict[bytes, None] = OrderedDict()
        """The news that last, for neighbours that connect later."""
        self._fresh: list[tuple[bytes, int]] = []
        """News to pass on, and who has sent them."""
        self._callers: OrderedDict[tuple[bytes, int], Caller] = OrderedDict()
        """Processes that have called for a group, until this process takes the socket."""
        self._asked = self._looked = self._beat = 0.0
        """When the processes were asked last, when steps were looked at; when to beat next."""
        self._closing = self._forgotten = self._ended = False
        self._failure: Verdict | None = None
        """Why the thread has ended, unless it was closed."""
        self._thread = threading.Thread(target=self._run, name="taktline control", daemon=True)
        if self._network.threaded:
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
            member.verdict, member.addresses = None, {}
            member.heard.clear()
            self._members.add(member)
            if verdict := self._failure or self._left.get(member.place):
                self._leave(member, verdict)

    def leave(self, member: Member) -> None:
        """Tell a member of no further verdicts."""
        with self._lock:
            self._members.discard(member)

    def meet(self, member: Member, seconds: float) -> None:
        """Wait until all processes of a member have come, which tells their addresses.

        The wait ends with a :class:`PeerFailure` after so many seconds, if the member has a
        verdict, or if a process is gone.
        """
        deadline = self._now() + seconds

        def absent() -> list[int]:
            come = self._came.get(member.place, {})
            return [process for process in member.processes if process not in come]

        def is_over() -> bool:
            gone = not self.news.gone.keys().isdisjoint(member.processes)
            return gone or member.verdict is not None or not absent()

        with self._lock:
            self._send("came", (self.process, member.place, self.address))
            self._changed.wait_for(is_over, seconds)
            if missing := absent():
                others = [process for process in missing if process != self.process]
                raise PeerFailure(others, timed_out=self._now() > deadline)
            member.addresses = dict(self._came[member.place])
            whole = f"{member.place}/{sorted(member.addresses.items())}"
            member.meeting = purpose_of(whole).hex()

    def connect(self, member: Member, process: int, what: str, seconds: float) -> socket.socket:
        """A socket to another process of a member, which calls this, too, with the same text."""
        purpose = purpose_of(f"{member.meeting}/{what}")
        if process < self.process:
            try:
                return ready(call(member.addresses[process], purpose, self.process, seconds))
            except OSError as error:
                raise PeerFailure([process], timed_out=False) from error
        key = purpose, process
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._callers or member.verdict is not None, seconds
            )
            if key not in self._callers:
                raise PeerFailure([process], timed_out=True)
            return ready(self._callers.pop(key).socket)

    # What processes do.

    def stalled(self, processes: Sequence[int], awaited: Collection[int], what: str) -> Verdict:
        """A verdict on the process that holds up a group; it may be any process of the job."""
        self._ask()
        return self.news.stalled({*self.news.here, *processes}, awaited, what)

    def lives(self, process: int) -> bool:
        """Whether a process lives, as far as is known."""
        self._ask()
        return self.news.lives(process)

    def report(self, processes: Sequence[int]) -> str:
        """A line for each of these processes: what it is doing."""
        self._ask()
        return self.news.report(processes)

    def _ask(self) -> None:
        """Ask processes that are no neighbours what they do, and wait until they have answered."""
        if not self._far():
            return
        with self._lock:
            self._send("ask", secrets.randbits(62))
        deadline = self._now() + _ANSWER_SECONDS
        while (left := deadline - self._now()) > 0 and self._far() - self.news.heard.keys():
            if threading.current_thread() is self._thread:
                self._serve(left)
            else:
                time.sleep(_HURRY_SECONDS / 5)

    def _far(self) -> set[int]:
        """The processes that tell this one what they do only if they are asked."""
        return self.news.here - {self.process, *self._known, *self.news.gone}

    # Verdicts.

    def announce(self, verdict: Verdict) -> None:
        """Leave all groups; before this returns, the kernel has what the neighbours are told."""
        with self._lock:
            self._conclude(verdict, [member.place for member in self._members])

    def raised(self, error: BaseException) -> None:
        """Announce that an error ends this program, unless all members have a verdict."""
        if self._pid == os.getpid():  # in a forked process, the lock may be held for good
            text = f"{type(error).__name__}: {text_of(error, 2000)}"
            self.announce(Verdict(Cause.RAISED, self.process, text, OUTSIDE))

    def forget(self) -> None:
        """Close the plane in a process that goes on."""
        self._forgotten = True
        self.close()

    def close(self) -> None:
        """Say goodbye, and end the thread."""
        if self._closing or self._pid != os.getpid():
            return
        self._tell_neighbours("goodbye")
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:  # Python may collect a group there
            self._thread.join(_GOODBYE_SECONDS)

    def close_inherited(self) -> None:
        """Close the sockets of the process from which this one was forked."""
        self._close_sockets()

    # The control thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self.turn()
        except BaseException as error:
            self._fail(error)
        with self._lock:
            self._ended = True
            self._close_sockets()
        if self._forgotten:
            # Later groups of this process meet in the store, too; it may be gone.
            with suppress(RuntimeError):
                self._store.delete_key(str(self.process))

    def _fail(self, error: BaseException) -> None:
        """Fail the job loudly, on every rank."""
        _log.critical("the control plane of rank %d has failed", self.process, exc_info=error)
        text = f"{type(error).__name__}: {text_of(error, 2000)}"
        self._failure = failure = Verdict(Cause.RAISED, self.process, text, "in its control thread")
        with suppress(Exception):
            self.announce(failure)
        with self._lock:
            for member in list(self._members):
                self._leave(member, failure)

    def turn(self) -> None:
        """One round: look at the steps, tell the neighbours, and take what has arrived."""
        now = self._now()
        with self._lock:
            left = any(member.verdict is not None for member in self._members)
        pause = _HURRY_SECONDS if self.watched and left else _TICK_SECONDS
        if self._looked and now > self._looked + pause + _LAPSE_SECONDS:
            self._looked = now  # first read what the others have sent meanwhile
        elif now >= self._looked + pause:
            self._looked = now
            self._tick()
        if now >= self._beat:
            self._beat = now + _BEAT_SECONDS
            self._tell_neighbours("beat", self.news.own())
        due = min([self._looked + pause, self._due, *(at for at, _ in self._lost)])
        self._serve(max(0.0, due - self._now()))

    def _tell_neighbours(self, kind: str, body: Any = None) -> None:
        message = encode(kind, body)
        with self._lock:
            for process in self.connected:
                self._write(process, message)

    def _tick(self) -> None:
        for each in self.watched:
            try:
                each.tick()
            except Exception as error:  # a failing look must not stop the control thread
                _log.debug("the control plane could not look at a step: %s", error)

    def _serve(self, seconds: float) -> None:
        """Wait so long at most until something arrives, take it, and pass it on."""
        self._look()
        self._wait(seconds)
        with self._lock:
            now = self._now()
            for loss in [each for each in self._lost if each[0] <= now]:
                self._lost.remove(loss)
                if self.news.gone.get(loss[1]) == LOST:  # no goodbye has come by another way
                    places = [m.place for m in self._members if loss[1] in m.processes]
                    self._conclude(Verdict(Cause.LOST, loss[1]), places)
            self._spread()

    # News. What follows is called with the lock.

    def _keep(self, caller: Caller) -> None:
        """Keep a socket until this process comes to the group that it is for."""
        if before := self._callers.pop((caller.purpose, caller.number), None):
            before.socket.close()
        self._callers[caller.purpose, caller.number] = caller
        if len(self._callers) > _WAITING:
            self._callers.popitem(last=False)[1].socket.close()
        self._changed.notify_all()

    def _send(self, kind: str, body: Any) -> None:
        """Send news of this process."""
        self._take(self.process, kind, body, encode(kind, body))
        self._spread()

    def _lasting(self) -> bytes:
        return encode("beat", self.news.own()) + b"".join(self._facts)

    def _spread(self) -> None:
        """Send the neighbours the news that have come since the last time."""
        fresh, self._fresh = self._fresh, []
        for process in self.connected if fresh and not self._ended else ():
            self._write(process, b"".join(data for data, source in fresh if source != process))

    def _take(self, source: int, kind: str, body: Any, data: bytes) -> None:
        """Take a message of a neighbour, or of this process, and pass it on if it is new."""
        if kind == "beat":
            self.news.note(body)
            return
        digest = blake2b(data, digest_size=16).digest()
        answered = kind == "ask" and self._now() <= self._asked + _SAME_ANSWER_SECONDS
        if digest in self._seen or data in self._facts or answered:
            return
        self._seen[digest] = None
        _trim(self._seen, _SEEN)
        if kind in ("gone", "came", "left"):
            self._facts[data] = None
            _trim(self._facts, _FACTS)
        self._fresh.append((data, source))
        self._learn(kind, body)
        self._changed.notify_all()

    def _learn(self, kind: str, body: Any) -> None:
        """Learn of what is new."""
        if kind == "ask":
            self._answer()
        elif kind == "state":
            self.news.note(body)
        elif kind == "gone":
            process, how = body
            if process != self.process and self.news.gone.get(process) != ENDED:
                self.news.gone[process] = how
                if how == LOST:
                    self._lost.append((self._now() + _GRACE_SECONDS, process))
        elif kind == "came":
            process, place, address = body
            self._came.setdefault(place, {})[process] = address
            _trim(self._came, _PLACES)
            self.news.here.add(process)
        elif kind == "left":
            process, verdict, places = body
            for place in places:
                self._left.setdefault(place, verdict)
            _trim(self._left, _PLACES)
            if process != self.process:
                self._conclude(verdict, places)

    def _note_gone(self, process: int, how: str) -> None:
        if process not in self.news.gone or how == ENDED:
            self._send("gone", (process, how))

    def _has_come(self, process: int) -> bool:
        return process in self.news.here

    def _answer(self) -> None:
        """Say what this process does, and what its silent neighbours did last."""
        self._asked = self._now()
        self.news.drop(self._far(), _SAME_ANSWER_SECONDS)
        for state in [self.news.own(), *self.news.silent(self._known)]:
            self._take(self.process, "state", state, encode("state", state))

    # Verdicts.

    def _conclude(self, verdict: Verdict, places: Collection[str]) -> None:
        """If a verdict is about the place of one member, leave all of them, and tell their groups.

        All of them: a process that has lost a replica, say, does not come to its pipeline either.
        """
        leaving = {m.place: m for m in list(self._members) if m.verdict is None}
        if leaving.keys().isdisjoint(places):
            return
        # First the news: this process may end as soon as its members have left.
        self._send("left", (self.process, verdict, [*leaving]))
        for member in leaving.values():
            self._leave(member, verdict)

    def _leave(self, member: Member, verdict: Verdict) -> None:
        if member.verdict is not None:
            return
        member.verdict = verdict
        try:
            member.leave(verdict)
        except Exception as error:  # the others must leave all the same
            _log.debug("could not leave a group: %s", error)
        member.heard.set()
        self._changed.notify_all()


def _trim(known: OrderedDict[Any, Any], most: int) -> None:
    """Forget the oldest."""
    while len(known) > most:
        known.popitem(last=False)
