"""The control plane: news between processes that never wait for data.

A process has a socket to each of its neighbours, and a thread that serves these sockets. The store
is asked for addresses only while the processes meet: later its host may be the one that is gone.

Everything that others must know is a fact for everyone. A process passes on what is new to it to
all of its neighbours. So no lost or stopped process can keep news from the others.

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
import signal
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet, finalize

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from taktline.errors import text_of
from taktline.transport.base import Watched
from taktline.transport.communicators import default_group
from taktline.transport.exit_hooks import planes, store_name
from taktline.transport.links import Network, Ring, trim
from taktline.transport.news import ENDED, LOST, OUTSIDE, Cause, Verdict, Vote, encode
from taktline.transport.sockets import Address, call, pid_of, purpose_of, ready

_TICK_SECONDS, _HURRY_SECONDS = 0.25, 0.05
"""How often running steps are looked at; the second while a member has a verdict."""
_STATE_SECONDS = 2 * _TICK_SECONDS
"""How often neighbours are told what this process does."""
_GRACE_SECONDS = 0.15
"""How long news of a lost process may still arrive: its program may just have ended in order."""
_LAPSE_SECONDS = 1.0
"""How late a look must be to show that this process was stopped itself."""
_GOODBYE_SECONDS = 1.0
_ANSWER_SECONDS = 1.0
"""How long to wait until processes have said what they do."""
_SAME_ANSWER_SECONDS = 0.25
"""For how long an answer serves whoever asks."""
_PLACES = 1 << 10
"""How many places are remembered."""

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


@dataclass(slots=True)
class _Place:
    """What is known of a place."""

    come: dict[int, Address] = field(default_factory=dict[int, Address])
    """The processes that have come."""
    verdict: Verdict | None = None
    """Why a process has left."""


class Plane(Ring):
    """The control plane of one process: its sockets, and the thread that serves them.

    The store is where the processes of the job find each other, under ``name``.
    """

    def __init__(
        self, store: Store, process: int, size: int, name: str, network: Network | None = None
    ) -> None:
        super().__init__(store, process, size, name, network)
        self.watched: tuple[Watched, ...] = ()
        """The steps that are running."""
        self.in_company = False
        """Whether pipelines of this process share their work: with replicas, or in parts."""
        self.numbers = list(range(size))
        """The processes of the default group, in the order of their ranks in it."""
        self.generation = 0
        """The election that has made the world of now; 0: it is as it was started."""
        self._keeper: Any = None
        """Closes the plane when the default group is gone."""
        self._pid = os.getpid()
        self._members: WeakSet[Member] = WeakSet()
        self._places: OrderedDict[str, _Place] = OrderedDict()
        self._lost: list[tuple[float, int]] = []  # processes, and when to conclude their loss
        self._asked, self._looked, self._told = 0.0, 0.0, self._now()
        """When a process asked what all do, steps were looked at, and neighbours were told."""
        self._closing = self._forgotten = False
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
            plane = cls(group.get_group_store(), *place)
            plane.serve(group)
        return plane

    def serve(self, group: ProcessGroup) -> None:
        """Be the plane of a default group, and of an earlier one no more."""
        if self._keeper is not None:
            self._keeper.detach()
        planes[group], self._keeper = self, finalize(group, self.forget)
        self._keeper.atexit = False

    # Groups.

    def join(self, member: Member) -> None:
        """Tell a member of verdicts from now on; in its next round, if it was told before."""
        with self._lock:
            again, member.round = member.round >= 0, member.round + 1
            while again and self._at(member.place).verdict is not None:
                member.round += 1
            member.verdict, member.addresses = None, {}
            member.heard.clear()
            self._members.add(member)
            if verdict := self._failure or self._at(member.place).verdict or self._called_away():
                self._leave([member], verdict)

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

        def is_over() -> bool:
            gone = not self.news.gone.keys().isdisjoint(member.processes)
            return gone or member.verdict is not None or come.keys() >= {*member.processes}

        with self._lock:
            come = self._at(member.place).come
            self.send("came", self.process, member.place, self.address)
            self._lock.wait_for(is_over, seconds)
            if missing := [process for process in member.processes if process not in come]:
                raise PeerFailure(missing, timed_out=self._now() > deadline)
            member.addresses = dict(come)
            whole = f"{member.place}/{sorted(come.items())}"
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
        with self._lock:
            self._lock.wait_for(lambda: key in self._callers or member.verdict is not None, seconds)
            if key not in self._callers:
                raise PeerFailure([process], timed_out=True)
            return ready(self._callers.pop(key).socket)

    def _at(self, place: str) -> _Place:
        """What is known of a place."""
        found = self._places.setdefault(place, _Place())
        trim(self._places, _PLACES)
        return found

    # Elections.

    def vote(self, vote: Vote) -> None:
        """Tell all processes with whom this one would go on."""
        self.send("votes", *vote)

    def await_news(self, seconds: float) -> None:
        """Wait until something is learned, but not longer."""
        with self._lock:
            self._lock.wait(seconds)

    def end(self, process: int) -> None:
        """End a process that hangs, if it is on this host: it must not go on later."""
        near = self._near.get(process)
        with self._lock, suppress(OSError):
            if near is not None and near.link is not None and (pid := pid_of(near.link.socket)):
                _log.warning("rank %d hangs, so rank %d ends it", process, self.process)
                os.kill(pid, signal.SIGKILL)

    def suspects(self) -> set[int]:
        """The processes that are lost, or did not answer in time, by the verdicts of its groups."""
        verdicts = [member.verdict for member in list(self._members)]
        causes = (Cause.LOST, Cause.STALLED)
        return {each.process for each in verdicts if each is not None and each.cause in causes}

    def _called_away(self) -> Verdict | None:
        """A verdict if others elect with whom to go on, and this process does not know why."""
        later = (vote for vote in self.news.votes.values() if vote.round > self.generation)
        if (vote := next(later, None)) is None:
            return None
        lost = [process for process in self.numbers if process not in vote.members]
        if lost:
            return Verdict(Cause.LOST, lost[0])
        return Verdict(Cause.CUT, vote.process, "another rank")

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
        far = self.news.here - {self.process, *self._near, *self.news.gone}
        if not far:
            return
        if self._now() > self._asked + _SAME_ANSWER_SECONDS:
            self.send("ask", self.process, secrets.randbits(62))
        deadline = self._now() + _ANSWER_SECONDS
        while (left := deadline - self._now()) > 0 and self.news.unheard(far, self._asked):
            if threading.current_thread() is self._thread:
                self._serve(left)
            else:
                time.sleep(_HURRY_SECONDS / 5)

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
            _log.critical("the control plane of rank %d has failed", self.process, exc_info=error)
            self._failure = self._raised(error, "in its control thread")
            with suppress(Exception):
                self.announce(self._failure)
        with self._lock:
            self._close_sockets()
        if self._forgotten and self._store is not None:
            # Later groups of this process meet in the store, too; it may be gone.
            with suppress(RuntimeError):
                self._store.delete_key(str(self.process))

    def turn(self) -> None:
        """One round: look at the steps, then wait for what arrives."""
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
        due = [self._looked + pause, self._due, *(at for at, _ in self._lost)]
        self._serve(max(0.0, min(due) - self._now()))

    def _serve(self, seconds: float) -> None:
        """Tell the neighbours, wait so long at most until something arrives, and pass it on."""
        self._look()
        now = self._now()
        if now >= self._told + _STATE_SECONDS:
            self._told = now
            asked = now < self._asked + _ANSWER_SECONDS
            states = [self.news.own(), *(self.news.silent(self._near) if asked else ())]
            with self._lock:
                for process in self.connected:
                    self._write(process, b"".join(encode("state", *state) for state in states))
        self._wait(seconds)
        with self._lock:
            now = self._now()
            for loss in [each for each in self._lost if each[0] <= now]:
                self._lost.remove(loss)
                if self.news.gone.get(loss[1]) == LOST:  # no goodbye has come by another way
                    places = [m.place for m in self._members if loss[1] in m.processes]
                    self._conclude(Verdict(Cause.LOST, loss[1]), places)
            self._spread()

    # What follows is called with the lock.

    def _learn(self, kind: str, body: Any) -> bool:
        now = self._now()
        if kind == "state":
            is_answer = self.news.note(body, self._asked)
            return is_answer and now < self._asked + _ANSWER_SECONDS
        if kind == "ask":
            if now <= self._asked + _SAME_ANSWER_SECONDS:
                return False
            self._asked, self._told = now, 0.0
        elif kind == "gone":
            process, how = body
            if process != self.process and self.news.gone.get(process) != ENDED:
                self.news.gone[process] = how
                if how == LOST:
                    self._lost.append((now + _GRACE_SECONDS, process))
        elif kind == "came":
            process, place, address = body
            self._at(place).come[process] = self.addresses[process] = address
            self.news.here.add(process)
        elif kind == "votes":
            known = self.news.votes.get(body.process)
            if known is None or known.number < body.number:
                self.news.votes[body.process] = body
            if verdict := self._called_away():
                self._leave(list(self._members), verdict)
        else:
            verdict, places = body
            for place in map(self._at, places):
                place.verdict = place.verdict or verdict
            self._conclude(verdict, places)
        return True

    def _conclude(self, verdict: Verdict, places: Collection[str]) -> None:
        """If a verdict is about the place of one member, leave all of them, and tell their groups.

        All of them: a process that has lost a replica, say, does not come to its pipeline either.
        """
        leaving = [member for member in self._members if member.verdict is None]
        if any(member.place in places for member in leaving):
            self._leave(leaving, verdict)

    def _leave(self, members: Sequence[Member], verdict: Verdict) -> None:
        """Tell everyone that members have a verdict, and let them leave."""
        leaving = [member for member in members if member.verdict is None]
        for member in leaving:
            member.verdict = verdict
        try:  # first the news: this process may end as soon as its members have left
            self.send("left", verdict, [member.place for member in leaving])
        finally:
            for member in leaving:
                try:
                    member.leave(verdict)
                except Exception as error:  # the others must leave all the same
                    _log.debug("could not leave a group: %s", error)
                member.heard.set()
            self._lock.notify_all()
