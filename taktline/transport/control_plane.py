"""The control plane: news between processes that never wait for data.

A process has a socket to each of its neighbours, and a thread that serves these sockets. The store
is asked for addresses only while the processes meet: later its host may be the one that is gone.

Everything that others must know is news for everyone. A process passes on what is new to it to all
of its neighbours. So no lost or stopped process can keep news from the others, and news of one
process arrive in the order in which it has sent them.

If a socket ends without a goodbye, its process has died. Its neighbours notice. They tell each
other what they do, twice a second; a process that has to know it of others asks everyone.

If the thread itself fails, so does the job: without it no later fault would be known.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import count
from typing import Any
from weakref import WeakSet, finalize

from torch.distributed.distributed_c10d import Store

from taktline.errors import text_of
from taktline.transport.base import Watched
from taktline.transport.communicators import default_group
from taktline.transport.exit_hooks import planes, store_name
from taktline.transport.links import At, Links, Network, encode
from taktline.transport.news import ENDED, LOST, News
from taktline.transport.sockets import Caller, call, own_host, purpose_of, ready
from taktline.transport.verdict import OUTSIDE, Cause, Member, Verdict

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
_VERDICTS, _PLACES, _WAITING = 256, 1024, 256
"""How many verdicts and places are remembered, and how many callers may wait to be taken."""

_log = logging.getLogger("taktline")


class PeerFailure(Exception):
    """Processes have not come, did not answer in time, or their connections have ended."""

    def __init__(self, processes: Sequence[int], timed_out: bool) -> None:
        super().__init__("no answer in time" if timed_out else "a connection has ended")
        self.processes = processes
        self.timed_out = timed_out


class Plane:
    """The control plane of one process: its sockets, and the thread that serves them.

    Args:
        store: where the processes of the job find each other, under ``name``.
        process: the number of this one, of ``size``.
        network: how others are reached.
    """

    def __init__(
        self, store: Store, process: int, size: int, name: str, network: Network | None = None
    ) -> None:
        network = network or Network()
        self.process = process
        self.state: Callable[[], tuple[str, bool]] = lambda: ("is not in a step", False)
        """What this process is doing, and whether that is a step."""
        self.watched: tuple[Watched, ...] = ()
        """The steps that are running."""
        self.in_company = False
        """Whether pipelines of this process share their work: with replicas, or in parts."""
        self.news = News(process, lambda: self.state(), network.now)
        self._now = network.now
        self._pid = os.getpid()
        self._lock = threading.RLock()
        """Held by whoever changes what follows, or writes to the sockets."""
        self._changed = threading.Condition(self._lock)
        self._numbers = count(time.time_ns())  # so that those of a later plane are higher
        self._members: WeakSet[Member] = WeakSet()
        self._at: OrderedDict[str, dict[int, At]] = OrderedDict()
        """By place and process: the latest coming or leaving."""
        self._verdicts: OrderedDict[int, tuple[int, Verdict]] = OrderedDict()
        """By number: who has found a verdict, and it."""
        self._questions: set[int] = set()
        self._concluded: set[int] = set()
        """The numbers of verdicts because of which this process has left its groups."""
        self._lost: list[tuple[float, int]] = []  # processes, and when to conclude their loss
        self._fresh: list[tuple[bytes, int]] = []
        """News to pass on, and who has sent them."""
        self._callers: OrderedDict[tuple[bytes, int], Caller] = OrderedDict()
        """Processes that have called for a group, until this process takes the socket."""
        self._asked = self._looked = self._beat = 0.0
        """When the processes were asked last, when steps were looked at; when to beat next."""
        self._closing = self._forgotten = self._ended = False
        self._failure: Verdict | None = None
        """Why the thread has ended, unless it was closed."""
        self._links = Links(
            store,
            process,
            size,
            name,
            network,
            own_host(store),
            self._lock,
            self.news.here,
            news=self._all_news,
            take=self._take,
            arrived=self._keep,
            gone=self._note_gone,
        )
        self._near = {*self._links.neighbours}
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
        """Tell a member of verdicts from now on; also again, after it has left."""
        with self._lock:
            if member.verdict is None and member.met:
                member.past = member.met
            member.verdict = None
            member.heard.clear()
            self._members.add(member)
            left = [self._verdicts.get(at.verdict) for at in self._at_place(member).values()]
            if self._failure is not None:
                self._leave(member, self._failure)
            elif member.past is None and (known := [each for each in left if each is not None]):
                self._leave(member, known[0][1])

    def leave(self, member: Member) -> None:
        """Tell a member of no further verdicts."""
        with self._lock:
            self._members.discard(member)

    def meet(self, member: Member, seconds: float) -> None:
        """Wait until all processes of a member have come, which tells their addresses.

        The wait ends with a :class:`PeerFailure` after so many seconds, if the member has a
        verdict, or if a process is gone.
        """
        number, deadline = next(self._numbers), self._now() + seconds
        came = At(self.process, number, member.place, number, self._links.address, 0)

        def is_over() -> bool:
            gone = not self.news.gone.keys().isdisjoint(member.processes)
            return gone or member.verdict is not None or not absent()

        def absent() -> list[int]:
            come = self._come(member)
            return [process for process in member.processes if process not in come]

        with self._lock:
            self._send("at", came)
            self._changed.wait_for(is_over, seconds)
            if missing := absent():
                others = [process for process in missing if process != self.process]
                raise PeerFailure(others, timed_out=self._now() > deadline)
            come = self._come(member)
            member.addresses = {p: at.address for p, at in come.items() if at.address is not None}
            member.met = {process: come[process].came for process in member.processes}
            member.meeting = purpose_of(f"{member.place}/{member.met}").hex()

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
            self._send("ask", next(self._numbers))
        deadline = self._now() + _ANSWER_SECONDS
        while (left := deadline - self._now()) > 0 and self._far() - self.news.heard.keys():
            if threading.current_thread() is self._thread:
                self._serve(left)
            else:
                time.sleep(_HURRY_SECONDS / 5)

    def _far(self) -> set[int]:
        """The processes that tell this one what they do only if they are asked."""
        return self.news.here - {self.process, *self._near, *self.news.gone}

    # Verdicts.

    def announce(self, verdict: Verdict) -> None:
        """Conclude a verdict; before this returns, the kernel has what the neighbours are told."""
        with self._lock:
            self._send("verdict", (self.process, verdict))

    def raised(self, error: BaseException) -> None:
        """Announce that an error ends this program, unless all members have a verdict."""
        if self._pid != os.getpid():  # forked: the lock may be held for good
            return
        text = f"{type(error).__name__}: {text_of(error, 2000)}"
        if any(member.verdict is None for member in self._all()):
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
        self._links.wake()
        if threading.current_thread() is not self._thread:  # Python may collect a group there
            self._thread.join(_GOODBYE_SECONDS)

    def close_inherited(self) -> None:
        """Close the sockets of the process from which this one was forked."""
        self._links.close()

    # The control thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self.turn()
        except BaseException as error:
            self._fail(error)
        with self._lock:
            self._ended = True
            self._links.close()
        if self._forgotten:
            self._links.forget()

    def _fail(self, error: BaseException) -> None:
        """Fail the job loudly, on every rank."""
        _log.critical("the control plane of rank %d has failed", self.process, exc_info=error)
        text = f"{type(error).__name__}: {text_of(error, 2000)}"
        self._failure = failure = Verdict(Cause.RAISED, self.process, text, "in its control thread")
        with suppress(Exception):
            self.announce(failure)
        with self._lock:
            for member in self._all():
                if member.verdict is None:
                    self._leave(member, failure)

    def turn(self) -> None:
        """One round: look at the steps, tell the neighbours, and take what has arrived."""
        now = self._now()
        hurries = self.watched and any(member.verdict is not None for member in self._all())
        pause = _HURRY_SECONDS if hurries else _TICK_SECONDS
        if self._looked and now > self._looked + pause + _LAPSE_SECONDS:
            self._looked = now  # first read what the others have sent meanwhile
        elif now >= self._looked + pause:
            self._looked = now
            self._tick()
        if now >= self._beat:
            self._beat = now + _BEAT_SECONDS
            self._tell_neighbours("beat", self.news.own())
        due = min([self._looked + pause, self._links.due, *(at for at, _ in self._lost)])
        self._serve(max(0.0, due - self._now()))

    def _tell_neighbours(self, kind: str, body: Any = None) -> None:
        message = encode(kind, body)
        with self._lock:
            for process in self._links.connected:
                self._links.write(process, message)

    def _tick(self) -> None:
        for each in self.watched:
            try:
                each.tick()
            except Exception as error:  # a failing look must not stop the control thread
                _log.debug("the control plane could not look at a step: %s", error)

    def _serve(self, seconds: float) -> None:
        """Wait so long at most until something arrives, take it, and pass it on."""
        self._links.look()
        self._links.wait(seconds)
        with self._lock:
            now = self._now()
            for loss in [each for each in self._lost if each[0] <= now]:
                self._lost.remove(loss)
                if self.news.gone.get(loss[1]) == LOST:  # no goodbye has come by another way
                    self._conclude(Verdict.loss(loss[1]), loss[1])
            self._spread()

    # News. What follows is called with the lock.

    def _take(self, source: int, kind: str, body: Any) -> None:
        """Take a message of a neighbour."""
        if kind == "beat":
            self.news.note(body)
        else:
            self._hear(kind, body, source)

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
        self._hear(kind, body, self.process)
        self._spread()

    def _all_news(self) -> bytes:
        """For a neighbour that has just connected; and what this process is doing."""
        found = [encode("beat", self.news.own())]
        found += [encode("verdict", each) for each in self._verdicts.values()]
        found += [encode("at", each) for place in self._at.values() for each in place.values()]
        found += [encode("gone", each) for each in self.news.gone.items()]
        return b"".join(found)

    def _hear(self, kind: str, body: Any, source: int) -> None:
        """Take news of a neighbour, or of this process, and pass on what is new of them."""
        if kind == "gone":
            self._note_gone(body[0], body[1] == ENDED, source)
        elif kind == "state":
            if self.news.note(body):
                self._pass_on(kind, body, source)
        elif kind == "ask":
            if body not in self._questions and self._now() > self._asked + _SAME_ANSWER_SECONDS:
                self._questions.add(body)
                self._pass_on(kind, body, source)
                self._answer()
        elif kind == "verdict":
            if body[1].number not in self._verdicts:
                self._verdicts[body[1].number] = body
                if len(self._verdicts) > _VERDICTS:
                    self._verdicts.popitem(last=False)
                self._pass_on(kind, body, source)
                self._conclude(body[1], body[0])
        elif kind == "at":
            self._note_at(body, source)

    def _pass_on(self, kind: str, body: Any, source: int) -> None:
        self._fresh.append((encode(kind, body), source))

    def _spread(self) -> None:
        """Send the neighbours the news that have come since the last time."""
        fresh, self._fresh = self._fresh, []
        for process in self._links.connected if fresh and not self._ended else ():
            data = b"".join(message for message, source in fresh if source != process)
            self._links.write(process, data)

    def _note_gone(self, process: int, goodbye: bool, source: int | None = None) -> None:
        """Note that a process is not there any more."""
        how = ENDED if goodbye else LOST
        if process == self.process or self.news.gone.get(process) in (how, ENDED):
            return
        self.news.gone[process] = how
        self._pass_on("gone", (process, how), self.process if source is None else source)
        if how == LOST:
            self._lost.append((self._now() + _GRACE_SECONDS, process))
        self._changed.notify_all()

    def _answer(self) -> None:
        """Say what this process does, and what its silent neighbours did last."""
        self._asked = self._now()
        self.news.drop(self._far(), _SAME_ANSWER_SECONDS)
        for state in [self.news.own(), *self.news.silent(self._near)]:
            self._pass_on("state", state, self.process)

    def _note_at(self, at: At, source: int) -> None:
        """Note that a process has come to a place, or has left it."""
        here = self._at.setdefault(at.place, {})
        if at.process in here and here[at.process].number >= at.number:
            return
        here[at.process] = at
        if len(self._at) > _PLACES:
            self._at.popitem(last=False)
        self.news.here.add(at.process)
        self._pass_on("at", at, source)
        if at.address is None and at.process != self.process and at.verdict in self._verdicts:
            verdict = self._verdicts[at.verdict][1]
            self._conclude(verdict, at.process)
            for member in self._all():  # also one that has come after the verdict
                if member.place == at.place and not self._is_past(member, at.process):
                    self._leave(member, verdict)
        self._changed.notify_all()

    # Verdicts.

    def _at_place(self, member: Member) -> dict[int, At]:
        return self._at.get(member.place, {})

    def _come(self, member: Member) -> dict[int, At]:
        """The processes that are at the place of a member."""
        past = member.past or {}
        return {
            process: at
            for process, at in self._at_place(member).items()
            if at.address is not None and at.came > past.get(process, 0)
        }

    def _is_past(self, member: Member, source: int) -> bool:
        """Whether what a process says is about the time before this one has come again."""
        if member.past is None or source not in member.processes or source == self.process:
            return False
        at = self._at_place(member).get(source)
        return at is None or at.came <= member.past.get(source, 0)

    def _conclude(self, verdict: Verdict, source: int) -> None:
        """If a verdict concerns one member, leave all of them, and tell their groups.

        All of them: a process that has lost a replica, say, does not come to its pipeline either.
        """
        members = self._all()
        concerned = any({verdict.process, source} & {*member.processes} for member in members)
        if not concerned or verdict.number in self._concluded:
            return
        self._concluded.add(verdict.number)
        if verdict.number not in self._verdicts:
            self._hear("verdict", (self.process, verdict), self.process)
        leaving = [m for m in members if m.verdict is None and not self._is_past(m, source)]
        # First the news: a member that has left may come again at once, and say so.
        for member in leaving:
            own = self._at_place(member).get(self.process)
            came, number = own.came if own is not None else 0, next(self._numbers)
            left = At(self.process, number, member.place, came, None, verdict.number)
            self._hear("at", left, self.process)
        self._spread()
        for member in leaving:
            self._leave(member, verdict)

    def _leave(self, member: Member, verdict: Verdict) -> None:
        if member.verdict is not None:
            return
        member.past = {process: at.came for process, at in self._at_place(member).items()}
        member.verdict = verdict
        try:
            member.leave(verdict)
        except Exception as error:  # the others must leave all the same
            _log.debug("could not leave a group: %s", error)
        member.heard.set()
        self._changed.notify_all()

    def _all(self) -> list[Member]:
        with self._lock:
            return [*self._members]
