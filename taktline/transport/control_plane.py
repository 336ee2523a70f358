"""The control plane: messages between processes that never wait for data.

Every process has a socket to every other one, and a thread that serves these sockets. The store is
asked for addresses only while the processes meet: later its host may be the one that is gone.

::

    process 0 ───────── process 1      beat      "I am alive, and doing this", twice a second
        │  ╲           ╱  │            value     what others have to know, such as an address
        │     ╲     ╱     │            verdict   "I have left you, as this process is lost"
    process 2 ───────── process 3      goodbye   before a program ends in order

If a socket ends without a goodbye, its process has died, and all others know at once. If the thread
itself fails, so does the job: without it no later fault would be known.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from weakref import WeakSet, finalize

from torch.distributed.distributed_c10d import Store

from taktline.errors import text_of
from taktline.transport.base import Watched
from taktline.transport.communicators import default_group
from taktline.transport.control_messages import Message
from taktline.transport.control_news import Heard, News, Values
from taktline.transport.control_peers import Peers
from taktline.transport.early_end import store_name
from taktline.transport.exit_hooks import planes
from taktline.transport.verdict import OUTSIDE, Cause, Member, Verdict

_TICK_SECONDS, _HURRY_SECONDS = 0.25, 0.05
"""How often running steps are looked at; the second while a member has a verdict."""
_BEAT_SECONDS = 2 * _TICK_SECONDS
_GRACE_SECONDS = 0.1
"""How long messages of a lost process may still arrive: its program may just have ended."""
_LAPSE_SECONDS = 1.0
"""How late a look must be to show that this process was stopped itself."""
_SENDING_SECONDS = 1.0

_log = logging.getLogger("taktline")


class Plane:
    """The control plane of one process: its sockets to all others, and the thread that serves them.

    Args:
        store: where the processes of the job find each other, under ``name``.
        process: the number of this one, of ``size``.
    """

    def __init__(self, store: Store, process: int, size: int, name: str) -> None:
        self.process = process
        self.state: Callable[[], tuple[str, bool]] = lambda: ("is not in a step", False)
        """What this process is doing, and whether that is a step."""
        self.watched: tuple[Watched, ...] = ()
        """The steps that are running."""
        self.entangled = False
        """Whether pipelines of this process share their work: with replicas, or in parts."""
        self.news = News(process, lambda: self.state())
        self._pid = os.getpid()
        self._values = Values()
        self._known: set[int] = set()
        """The numbers of verdicts that were concluded."""
        self._members: WeakSet[Member] = WeakSet()
        self._left: dict[str, Verdict] = {}
        """Why other processes have left a place to which this one has not come."""
        self._lost: list[tuple[float, int]] = []  # processes, and when to conclude their loss
        self._lock = threading.Lock()
        self._outgoing: list[tuple[Message, Collection[int], threading.Event]] = []
        self._closing = self._forgotten = False
        self._failure: Verdict | None = None
        """Why the thread has ended, unless it was closed."""
        self._peers = Peers(
            store, process, size, name, greet=self._greet, take=self._take, part=self._part
        )
        self.host = self._peers.host
        """The address under which other hosts reach this one."""
        self._thread = threading.Thread(target=self._run, name="taktline control", daemon=True)
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
        # Waits until it is sent, so that a process that connects later gets it just once.
        self.post(processes, place, value).wait(_SENDING_SECONDS)

    def post(self, processes: Collection[int], place: str, value: str) -> threading.Event:
        """Tell a value without waiting; returns an event that is set once it is sent."""
        return self._send(Message("value", state=place, value=value), processes)

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
        return found

    def stalled(self, processes: Sequence[int], awaited: Collection[int], what: str) -> Verdict:
        """A verdict on the process that holds up a group; it may be any process of the job."""
        return self.news.stalled({*self._peers.present, *processes}, awaited, what)

    def announce(self, verdict: Verdict) -> None:
        """Conclude a verdict; before this returns, it is sent to the groups of all members."""
        messages = self._conclude(verdict, self.process)
        if threading.current_thread() is self._thread:
            self._flush()
            return
        for sent in messages:  # this process may be about to end: by then the kernel has them
            sent.wait(_SENDING_SECONDS)

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
            for process in self._peers.connected:
                self._peers.write(process, Message("goodbye"))
            return
        self._send(Message("goodbye"), self._peers.connected).wait(_SENDING_SECONDS)
        self._closing = True
        self._peers.wake()
        self._thread.join(_SENDING_SECONDS)

    def close_inherited(self) -> None:
        """Close the sockets of the process from which this one was forked."""
        self._peers.close()

    def raised(self, error: BaseException) -> None:
        """Announce that an error ends this program, unless all members have a verdict."""
        text = f"{type(error).__name__}: {text_of(error, 2000)}"
        if any(member.verdict is None for member in self._all()):
            self.announce(Verdict(Cause.RAISED, self.process, text, OUTSIDE))

    def _send(self, message: Message, processes: Collection[int]) -> threading.Event:
        done = threading.Event()
        if not processes or self._failure is not None:
            done.set()
            return done
        with self._lock:
            self._outgoing.append((message, processes, done))
        self._peers.wake()
        return done

    # What follows runs on the control thread.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._fail(error)
        self._peers.close()
        if self._forgotten:
            self._peers.forget()

    def _fail(self, error: BaseException) -> None:
        """Fail the job loudly, on every rank."""
        _log.critical("the control plane of rank %d has failed", self.process, exc_info=error)
        text = f"{type(error).__name__}: {text_of(error, 2000)}"
        self._failure = failure = Verdict(Cause.RAISED, self.process, text, "in its control thread")
        with suppress(Exception):
            for process in self._peers.connected:
                self._peers.write(process, Message("verdict", verdict=failure))
        for member in self._all():
            if member.verdict is None:
                self._leave(member, failure)

    def _serve(self) -> None:
        looked = beat = 0.0
        while not self._closing:
            now = time.monotonic()
            pause = _HURRY_SECONDS if self._hurries() else _TICK_SECONDS
            if looked and now > looked + pause + _LAPSE_SECONDS:
                looked = now  # first read what the others have sent meanwhile
            elif now >= looked + pause:
                looked = now
                self._tick()
            if now >= beat:
                beat = now + _BEAT_SECONDS
                for process in self._peers.connected:
                    self._peers.write(process, Message("beat", *self.news.own()))
            self._peers.look()
            due = min([looked + pause, self._peers.due, *(at for at, _ in self._lost)])
            self._peers.wait(max(0.0, due - time.monotonic()))
            self._flush()
            self._conclude_losses()

    def _hurries(self) -> bool:
        return bool(self.watched) and any(member.verdict is not None for member in self._all())

    def _tick(self) -> None:
        for each in self.watched:
            try:
                each.tick()
            except Exception as error:  # a failing look must not stop the control thread
                _log.debug("the control plane could not look at a step: %s", error)

    def _flush(self) -> None:
        with self._lock:
            outgoing, self._outgoing = self._outgoing, []
        for message, processes, done in outgoing:
            if message.kind == "value":
                self._values.note(self.process, message.state, message.value)
            for process in processes:
                self._peers.write(process, message)
            done.set()

    def _greet(self, process: int) -> list[Message]:
        """The messages for a process that has just connected: all that the others have got."""
        mine = self._values.of(self.process)
        left = [m for m in self._all() if process in m.processes and m.verdict is not None]
        return [
            Message("beat", *self.news.own()),
            *(Message("value", state=place, value=value) for place, value in mine.items()),
            *(Message("verdict", state=m.place, verdict=m.verdict) for m in left),
        ]

    def _take(self, process: int, message: Message) -> None:
        match message.kind:
            case "beat":
                now = time.monotonic()
                self.news.heard[process] = Heard(now, message.state, message.busy)
            case "value":
                self._values.note(process, message.state, message.value)
                for member in self._all():
                    if member.place == message.state:
                        member.absent.discard(process)
            case "verdict" if message.verdict is not None:
                self._values.forget(process, message.state)
                self._conclude(message.verdict, process)
                self._note_left(process, message.state, message.verdict)
            case _:
                pass

    def _part(self, process: int, said_goodbye: bool) -> None:
        self.news.gone[process] = "has ended" if said_goodbye else "is lost"
        self._values.look_again()
        if not said_goodbye:
            self._lost.append((time.monotonic() + _GRACE_SECONDS, process))

    def _conclude_losses(self) -> None:
        now = time.monotonic()
        for loss in [each for each in self._lost if each[0] <= now]:
            self._lost.remove(loss)
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
        messages = [
            self._send(Message("verdict", state=m.place, verdict=verdict), m.processes)
            for m in leaving
        ]
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
