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

import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from weakref import WeakSet, finalize

import torch.distributed as dist

from taktline.errors import text_of
from taktline.transport.lifetime import planes
from taktline.transport.meeting import Meeting, Message
from taktline.transport.member import Member, Watched
from taktline.transport.news import News
from taktline.transport.peers import Peers, close_sockets, open_pipe
from taktline.transport.verdict import OUTSIDE, Cause, Verdict

__all__ = ["Plane"]

TICK_SECONDS, HURRY_SECONDS = 0.25, 0.05
"""How often steps are looked at, and how often while one of them is to be left."""
BEAT_SECONDS = 2 * TICK_SECONDS
GRACE_SECONDS = 0.1
"""How long what is under way may still arrive once a process is lost: a program may just end."""
_LAPSE_SECONDS = 1.0
_SENDING_SECONDS = 1.0

_log = logging.getLogger("taktline")


class Plane:
    """The sockets of this process to all others of the job, and the thread that minds them."""

    def __init__(self, meeting: Meeting) -> None:
        self.process = meeting.process
        self.state: Callable[[], tuple[str, bool]] = lambda: ("is not in a step", False)
        """What this process is doing, and whether that is a step."""
        self.watched: tuple[Watched, ...] = ()
        """The steps that are running."""
        self.entangled = False
        """Whether pipelines of this process share their work: with replicas, or in parts."""
        self._meeting = meeting
        self.news = News(meeting.process, lambda: self.state())
        self._mine: dict[str, str] = {}
        """What this process says of itself, by the place that it is for."""
        self._values: dict[int, dict[str, str]] = {}
        """The same of other processes, until they leave in the middle."""
        self._known: set[int] = set()
        """The numbers of verdicts."""
        self._members: WeakSet[Member] = WeakSet()
        self._due: list[tuple[float, Verdict, int]] = []
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._outgoing: list[tuple[Message, Collection[int], threading.Event]] = []
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._wake_fd = open_pipe()
        self._closing = self._forgotten = False
        self._selector.register(
            self._wake_end, selectors.EVENT_READ, lambda end: os.read(end, 4096)
        )
        self._peers = Peers(meeting, self._selector, self)
        self._thread = threading.Thread(target=self._run, name="taktline control", daemon=True)
        self._thread.start()

    @classmethod
    def current(cls) -> Plane | None:
        """The plane of the default process group, made once; None if there is none."""
        group = dist.distributed_c10d._get_default_group()
        if group.size() == 1:
            return None
        plane = planes.get(group)
        if plane is None or plane._meeting.pid != os.getpid():  # a fork has no thread
            store = dist.distributed_c10d._get_default_store()
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            name = f"taktline/control/{restart}"
            plane = planes[group] = cls(Meeting(store, group.rank(), group.size(), name))
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
                or bool(wanted & {*self.news.gone})
                or len(found()) == len(wanted)
            )

        with self._lock:
            self._arrived.wait_for(over, seconds)
            values = found()
            if len(values) == len(wanted):  # they are for this time only
                for process in wanted:
                    del self._values[process][place]
            values[self.process] = self._mine.pop(place, "")
            return values

    def gone(self, process: int) -> str | None:
        """Why a process is not there any more; None if it is."""
        return self.news.gone.get(process)

    def stalled(self, processes: Sequence[int], awaited: Collection[int], what: str) -> Verdict:
        """Who holds up a group, of all that are known to take part in the job."""
        everyone = {*self._peers.processes, *self._meeting.present, *processes}
        return self.news.stalled(everyone, awaited, what)

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
            for process in self._peers.processes:
                self._peers.write(process, Message("goodbye"))
            self._closing = True
            return
        self._send(Message("goodbye"), self._peers.processes).wait(_SENDING_SECONDS)
        self._closing = True
        self.wake()
        self._thread.join(_SENDING_SECONDS)

    def let_go(self) -> None:
        """Close the sockets of a process from which this one was forked."""
        self._peers.close()

    def wake(self) -> None:
        """Let the thread look at once."""
        with suppress(OSError):
            os.write(self._wake_fd, b"\0")

    def raised(self, error: BaseException) -> None:
        """An error has ended this program."""
        text = f"{type(error).__name__}: {text_of(error, 2000)}"
        if any(member.verdict is None for member in self._all()):
            self.announce(Verdict(Cause.RAISED, self.process, text, OUTSIDE))

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
        looked = beat = 0.0
        while not self._closing:
            now = time.monotonic()
            pause = HURRY_SECONDS if self._hurries() else TICK_SECONDS
            if looked and now > looked + pause + _LAPSE_SECONDS:
                looked = now  # this process was stopped itself: first hear what was said since
            elif now >= looked + pause:
                looked = now
                self._tick()
            if now >= beat:
                beat = now + BEAT_SECONDS
                self._beat()
            self._peers.look()
            due = [looked + pause, self._peers.due, *(at for at, *_ in self._due)]
            for key, _ in self._selector.select(max(0.0, min(due) - time.monotonic())):
                key.data(key.fileobj)
            self._flush()
            self._pass_on()
        close_sockets(self._selector)
        if self._forgotten:
            self._meeting.forget()
        os.close(self._wake_end)
        os.close(self._wake_fd)

    def _hurries(self) -> bool:
        return bool(self.watched) and any(member.verdict is not None for member in self._all())

    def _tick(self) -> None:
        for each in self.watched:
            try:
                each.tick()
            except Exception as error:  # what is told matters less than that this goes on
                _log.debug("the control plane could not look: %s", error)

    def _beat(self) -> None:
        try:
            state, busy = self.state()
        except Exception as error:
            _log.debug("the control plane could not look: %s", error)
            return
        for process in self._peers.processes:
            self._peers.write(process, Message("beat", state=state[:2000], busy=busy))

    def _flush(self) -> None:
        with self._lock:
            outgoing, self._outgoing = self._outgoing, []
        for message, processes, done in outgoing:
            if message.kind == "value":
                with self._lock:
                    self._mine[message.state] = message.value
            for process in processes:
                self._peers.write(process, message)
            done.set()

    def greet(self, process: int) -> list[Message]:
        """What a process is told that has just connected: whatever the others know."""
        with self._lock:
            mine = list(self._mine.items())
        verdicts = {m.verdict: None for m in self._all() if process in m.processes}
        return [
            Message("beat", *self.state()),
            *(Message("value", state=place, value=value) for place, value in mine),
            *(Message("verdict", verdict=verdict) for verdict in verdicts if verdict is not None),
        ]

    def take(self, process: int, message: Message) -> None:
        """A message has come."""
        match message.kind:
            case "beat":
                self.news.note(process, message.state, message.busy)
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

    def part(self, process: int, *, said_goodbye: bool) -> None:
        """A process has ended."""
        with self._lock:
            self.news.gone[process] = "has ended" if said_goodbye else "is lost"
            self._arrived.notify_all()
        if not said_goodbye:
            verdict = Verdict(Cause.LOST, process)
            self._due.append((time.monotonic() + GRACE_SECONDS, verdict, process))

    def _pass_on(self) -> None:
        """Conclude what is due, and tell the others of it."""
        now = time.monotonic()
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
