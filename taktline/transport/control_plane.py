"""The control plane: messages between processes that never wait for data.

A process has a socket to each of its neighbours, and a thread that serves these sockets. The store
is asked for addresses only while the processes meet: later its host may be the one that is gone.

If a socket ends without a goodbye, its process has died. Its neighbours notice, and pass it on as
news, which everyone hears. Neighbours tell each other what they do, twice a second. A process that
has to know it of others asks everyone, and all answers are news.

If the thread itself fails, so does the job: without it no later fault would be known.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakSet, finalize

from torch.distributed.distributed_c10d import Store

from taktline.errors import text_of
from taktline.transport.base import Watched
from taktline.transport.communicators import default_group
from taktline.transport.control_links import Links, Network
from taktline.transport.control_messages import Item, Routed, encode
from taktline.transport.control_news import ENDED, LOST, News, Values, is_in
from taktline.transport.control_routes import Routes
from taktline.transport.exit_hooks import planes, store_name
from taktline.transport.verdict import OUTSIDE, Cause, Member, Verdict

_TICK_SECONDS, _HURRY_SECONDS = 0.25, 0.05
"""How often running steps are looked at; the second while a member has a verdict."""
_BEAT_SECONDS = 2 * _TICK_SECONDS
_GRACE_SECONDS = 0.15
"""How long messages of a lost process may still arrive: its program may just have ended."""
_LAPSE_SECONDS = 1.0
"""How late a look must be to show that this process was stopped itself."""
_SENDING_SECONDS = 1.0
_ANSWER_SECONDS = 1.0
"""How long to wait until processes have said what they do."""
_SAME_ANSWER_SECONDS = 0.25
"""For how long an answer serves whoever asks."""

_log = logging.getLogger("taktline")


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
        self.entangled = False
        """Whether pipelines of this process share their work: with replicas, or in parts."""
        self.news = News(process, lambda: self.state(), network.now)
        self._size, self._now = size, network.now
        self._pid = os.getpid()
        self._values = Values()
        self._own: dict[str, Routed] = {}
        """The values of this process, by place."""
        self._numbers = count(time.time_ns())  # so that those of a later plane are higher
        self._known: set[int] = set()
        """The numbers of verdicts that were concluded."""
        self._passed_on: set[int] = set()
        """The numbers of verdicts and questions that were passed on."""
        self._members: WeakSet[Member] = WeakSet()
        self._left: dict[str, Verdict] = {}
        """Why other processes have left a place to which this one has not come."""
        self._lost: list[tuple[float, int]] = []  # processes, and when to conclude their loss
        self._lock = threading.Lock()
        self._outgoing: list[tuple[Callable[[], None], threading.Event]] = []
        self._here = 1 << process
        """The processes that have come, as bits."""
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
            self.news.here,
            news=self._all_news,
            linked=self._linked,
            take=self._take,
            part=lambda gone, goodbye: self._hear(
                ("gone", (gone, ENDED if goodbye else LOST)), process
            ),
        )
        self._routes = Routes(process, size, self._links, self.news, self._deliver)
        self.host = self._links.host
        """The address under which other hosts reach this one."""
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

    def join(self, member: Member, *, again: bool = False) -> None:
        """Tell a member of verdicts from now on.

        Args:
            member: the member.
            again: whether its processes have left each other before. A verdict from a process that
                has not come to the place again yet is about the time before.
        """
        with self._lock:
            self._members.add(member)
            left = self._left.pop(member.place, None)
            if again:
                here = {*self._values.at(member.place), self.process}
                member.absent = {*member.processes} - here
                left = None
        if verdict := self._failure or left:
            self._leave(member, verdict)

    def leave(self, member: Member) -> None:
        """Tell a member of no further verdicts."""
        with self._lock:
            self._members.discard(member)

    def tell(self, processes: Collection[int], place: str, value: str) -> None:
        """Tell processes a value, which they :meth:`gather` at a place."""
        self.post(processes, place, value).wait(_SENDING_SECONDS)

    def post(self, processes: Collection[int], place: str, value: str) -> threading.Event:
        """Tell a value without waiting; returns an event that is set once it is sent."""
        message = Routed(self.process, next(self._numbers), list(processes), place, value)
        return self._later(lambda: self._tell(message))

    def told(self, place: str) -> dict[int, str]:
        """The latest value of each process at a place; they stay there."""
        return self._values.at(place)

    def gather(
        self, member: Member, processes: Collection[int], place: str, seconds: float
    ) -> dict[int, str]:
        """The values that these processes tell at a place.

        The wait ends early, with values missing, after ``seconds``, if the member has a
        verdict, or if a process is gone.
        """

        def is_over() -> bool:
            return member.verdict is not None or any(p in self.news.gone for p in processes)

        found = self._values.gather(processes, place, seconds, is_over)
        self._values.forget(self.process, place)
        for told in [each for each in list(self._own) if is_in(each, place)]:
            self._own.pop(told, None)
        return found

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

    def announce(self, verdict: Verdict) -> None:
        """Conclude a verdict; before this returns, it is sent to the neighbours."""
        sent = [self._later(lambda: self._hear(("verdict", (self.process, verdict)), self.process))]
        sent += self._conclude(verdict, self.process)
        if threading.current_thread() is self._thread:
            self._flush()
            return
        for each in sent:  # this process may be about to end: by then the kernel has them
            each.wait(_SENDING_SECONDS)

    def forget(self) -> None:
        """Close the plane in a process that goes on."""
        self._forgotten = True
        self.close()

    def close(self) -> None:
        """Say goodbye, and end the thread."""
        if self._closing or self._pid != os.getpid():
            return
        if threading.current_thread() is self._thread:  # Python has collected a group there
            self._closing = True
            self._say_goodbye()
            return
        self._later(self._say_goodbye).wait(_SENDING_SECONDS)
        self._closing = True
        self._links.wake()
        self._thread.join(_SENDING_SECONDS)

    def close_inherited(self) -> None:
        """Close the sockets of the process from which this one was forked."""
        self._links.close()

    def raised(self, error: BaseException) -> None:
        """Announce that an error ends this program, unless all members have a verdict."""
        text = f"{type(error).__name__}: {text_of(error, 2000)}"
        if any(member.verdict is None for member in self._all()):
            self.announce(Verdict(Cause.RAISED, self.process, text, OUTSIDE))

    def _later(self, act: Callable[[], None]) -> threading.Event:
        """Let the control thread act; returns an event that is set once it has."""
        done = threading.Event()
        if self._ended:
            done.set()
            return done
        with self._lock:
            self._outgoing.append((act, done))
        self._links.wake()
        return done

    def _ask(self) -> None:
        """Ask processes that are no neighbours what they do, and wait until they have answered."""
        if not self._far():
            return
        on_thread = threading.current_thread() is self._thread
        asked = self._later(lambda: self._hear(("ask", next(self._numbers)), self.process))
        deadline = self._now() + _ANSWER_SECONDS
        while self._now() < deadline:
            if on_thread:
                self._serve(deadline - self._now())
            else:
                asked.wait(_ANSWER_SECONDS)
                time.sleep(_HURRY_SECONDS / 5)
            if asked.is_set() and all(process in self.news.heard for process in self._far()):
                return

    def _far(self) -> set[int]:
        """The processes that tell this one what they do only if they are asked."""
        return self.news.here - {self.process, *self._links.neighbours, *self.news.gone}

    # What follows runs on the control thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self.turn()
        except BaseException as error:
            self._fail(error)
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
            self._hear(("verdict", (self.process, failure)), self.process)
            self._routes.spread()
        for member in self._all():
            if member.verdict is None:
                self._leave(member, failure)

    def turn(self) -> None:
        """One round: look at the steps, tell the neighbours, and take what has arrived."""
        now = self._now()
        pause = _HURRY_SECONDS if self._hurries() else _TICK_SECONDS
        if self._looked and now > self._looked + pause + _LAPSE_SECONDS:
            self._looked = now  # first read what the others have sent meanwhile
        elif now >= self._looked + pause:
            self._looked = now
            self._tick()
        if now >= self._beat:
            self._beat = now + _BEAT_SECONDS
            said = encode("beat", self.news.own())
            for process in self._links.connected:
                self._links.write(process, said)
        due = min([self._looked + pause, self._links.due, *(at for at, _ in self._lost)])
        self._serve(max(0.0, due - self._now()))

    def _serve(self, seconds: float) -> None:
        """Wait so long at most until something arrives, take it, and pass it on."""
        self._links.look()
        self._links.wait(seconds)
        self._flush()
        self._conclude_losses()
        self._routes.spread()

    def _hurries(self) -> bool:
        return bool(self.watched) and any(member.verdict is not None for member in self._all())

    def _tick(self) -> None:
        for each in self.watched:
            try:
                each.tick()
            except Exception as error:  # a failing look must not stop the control thread
                _log.debug("the control plane could not look at a step: %s", error)

    def _flush(self) -> None:
        """Do what other threads have asked for."""
        with self._lock:
            outgoing, self._outgoing = self._outgoing, []
        for act, _ in outgoing:
            act()
        self._routes.spread()
        for _, done in outgoing:
            done.set()

    def _say_goodbye(self) -> None:
        for process in self._links.connected:
            self._links.write(process, encode("goodbye"))

    def _take(self, source: int, kind: str, body: Any) -> None:
        """Take a message of a neighbour."""
        if kind == "beat":
            self.news.note(body)
            self._routes.retry()
        elif kind == "routed":
            self._routes.route(body)
        else:
            for item in body:
                self._hear(item, source)

    # News.

    def _all_news(self) -> list[Item]:
        gone: list[Item] = [("gone", each) for each in self.news.gone.items()]
        return [("here", f"{self._here:x}"), *gone]

    def _hear(self, item: Item, source: int) -> None:
        """Take news of a neighbour, or of this process, and pass on what is new of them."""
        kind, body = item
        if kind == "here":
            self._welcome(int(body, 16) & ~self._here)
            return
        if kind == "gone":
            is_new = self._note_gone(*body)
        elif kind == "state":
            is_new = self.news.note(body)
        elif kind == "ask":
            is_new = self._now() > self._asked + _SAME_ANSWER_SECONDS and self._is_new(body)
        else:
            is_new = self._is_new(body[1].number)
        if is_new:
            self._routes.add(item, source)
        if is_new and kind == "ask":
            self._answer()
        elif is_new and kind == "verdict" and source != self.process:
            self._conclude(body[1], body[0])

    def _welcome(self, come: int) -> None:
        """Note processes that have come, as bits, and tell them what they have missed."""
        self._here |= come
        self._routes.add_come(come)
        if come:
            found = {process for process in range(self._size) if come >> process & 1}
            self.news.here |= found
            self._greet(found)

    def _is_new(self, number: int) -> bool:
        """Whether a verdict or a question has not come before."""
        if number in self._passed_on:
            return False
        self._passed_on.add(number)
        return True

    def _note_gone(self, process: int, how: str) -> bool:
        """Note that a process is not there any more; False if that is known."""
        if process == self.process or self.news.gone.get(process) in (how, ENDED):
            return False
        self.news.gone[process] = how
        self._values.look_again()
        if how == LOST:
            self._lost.append((self._now() + _GRACE_SECONDS, process))
        self._routes.avoid(process)
        return True

    def _answer(self) -> None:
        """Say what this process does, and what its silent neighbours did last."""
        self._asked = self._now()
        self.news.drop(self._far(), _SAME_ANSWER_SECONDS)
        for state in [self.news.own(), *self.news.silent(self._links.neighbours)]:
            self._routes.add(("state", state), self.process)

    # Messages for some processes.

    def _linked(self, process: int) -> None:
        """Tell a neighbour that has just connected what it may have missed."""
        self._links.write(process, encode("beat", self.news.own()))
        self._routes.repeat(process)

    def _greet(self, processes: set[int]) -> None:
        """Tell processes that have just come all that the others have got."""
        for message in list(self._own.values()):
            if to := processes.intersection(message.to):
                self._routes.route(replace(message, to=list(to)))
        for member in self._all():
            if member.verdict is not None and (to := processes.intersection(member.processes)):
                self._routes.route(self._farewell(member, member.verdict, list(to)))

    def _farewell(self, member: Member, verdict: Verdict, to: Sequence[int]) -> Routed:
        number = next(self._numbers)
        return Routed(self.process, number, list(to), member.place, verdict=verdict)

    def _tell(self, message: Routed) -> None:
        """Send a value of this process."""
        self._own[message.place] = message
        self._values.note(self.process, message.place, message.value, message.number)
        self._routes.route(message)

    def _deliver(self, message: Routed) -> None:
        source, place, number = message.origin, message.place, message.number
        if source == self.process:
            return
        if message.verdict is None:
            if self._values.note(source, place, message.value, number):
                for member in self._all():
                    if member.place == place:
                        member.absent.discard(source)
        elif self._values.leave(source, place, number):
            self._conclude(message.verdict, source)
            self._note_left(source, place, message.verdict)

    # Verdicts.

    def _conclude_losses(self) -> None:
        now = self._now()
        for loss in [each for each in self._lost if each[0] <= now]:
            self._lost.remove(loss)
            if self.news.gone.get(loss[1]) == LOST:  # no goodbye of it has come by another way
                self._conclude(Verdict(Cause.LOST, loss[1]), loss[1])

    def _conclude(self, verdict: Verdict, source: int) -> list[threading.Event]:
        """If a verdict concerns one member, let all of them leave, and tell their groups.

        All of them: a process that has lost a replica, say, does not come to its pipeline either.
        Returns an event for each message, which is set once it is sent.
        """
        members = self._all()
        if verdict.number in self._known:
            return []  # it was concluded before, and these may be new connections
        if not any(member.is_concerned(verdict, source) for member in members):
            return []
        self._known.add(verdict.number)
        leaving = [m for m in members if m.verdict is None and source not in m.absent]
        # First the messages: a member that has left may come again at once, and say so.
        farewells = [self._farewell(m, verdict, m.processes) for m in leaving]
        messages = [self._later(lambda each=each: self._routes.route(each)) for each in farewells]
        for member in leaving:
            self._leave(member, verdict)
        return messages

    def _leave(self, member: Member, verdict: Verdict) -> None:
        member.verdict = verdict
        try:
            member.leave(verdict)
        except Exception as error:  # the others must leave all the same
            _log.debug("could not leave a group: %s", error)
        member.told.set()
        self._values.look_again()

    def _note_left(self, process: int, place: str, verdict: Verdict) -> None:
        """A process has left a place, to which this one may come later, or after the verdict."""
        with self._lock:
            here = [member for member in self._members if member.place == place]
            if not here:
                self._left[place] = verdict
        for member in here:
            if member.verdict is None and process not in member.absent:
                self._leave(member, verdict)

    def _all(self) -> list[Member]:
        with self._lock:
            return [*self._members]
