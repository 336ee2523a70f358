"""The messages of the control plane, and what they say: what each process does, who has failed.

A message is a kind and a body, as JSON, with its length first. Neighbours tell each other::

    hello     the first message: where the sender can be called; then all facts that it knows
    beat      what the sender is doing, twice a second
    goodbye   the last message of a program that ends in order

The others are news, which everyone has to know, and which are passed on::

    ask       the question what all are doing
    state     what a process is doing
    gone      that a process is not there any more, and why
    came      that a process has come to the place where a group meets, and its address
    left      that a process has left places because of a verdict, and that verdict
"""

from __future__ import annotations

import json
import logging
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from taktline.checks import conform, read
from taktline.errors import JsonError, LostRankError, StallError, TaktlineError
from taktline.transport.exchange import restored
from taktline.transport.sockets import ADDRESS

SILENT_SECONDS = 2.0
"""After how long without a word a process counts as silent: that is four beats."""
COMPUTES = "computes"
"""What a process is doing that does not wait for others, as far as can be seen."""
ENDED, LOST = "has ended", "is lost"
"""Why a process is not there any more: after a goodbye, or without."""
OUTSIDE = "outside of a step"
"""The place of a rank that has finished every exchange in which it took part."""
LENGTH = struct.Struct("<I")
_LONGEST, _LONGEST_STATE = 50_000, 2000
"""The most characters of a report, which has to fit into a message, and of a state."""
_WHAT = "a message of the control plane"

_log = logging.getLogger("taktline")


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


class Cause(StrEnum):
    """What has happened to a rank."""

    LOST = "lost"
    """Its process has ended."""
    CUT = "cut"
    """Its connections have ended, but its process lives."""
    RAISED = "raised"
    """It has raised an error and left the others behind."""
    STALLED = "stalled"
    """It did not answer in time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why ranks cannot go on together: the first cause, which every rank reports.

    >>> print(Verdict(Cause.RAISED, 3, "KeyboardInterrupt", "in 2F0").error([2, 3]))
    rank 3 of the job has raised KeyboardInterrupt in 2F0, and left the others behind
    """

    cause: Cause
    process: int
    """The rank that has failed, by its number among all processes."""
    text: str = ""
    """The error that it has raised, the state of every rank, or the rank that cannot reach it."""
    where: str = ""
    """What it was doing."""
    stage_error: str = ""
    """The :class:`StageError` that it has raised, written, if it is one."""

    def error(self, group: Sequence[int]) -> TaktlineError:
        """The error to raise in a group of processes; it names the rank among all of them."""
        error = self._error(group)
        error.recoverable = "restart" if self.cause == Cause.LOST else "reconnect"
        return error

    def _error(self, group: Sequence[int]) -> TaktlineError:
        if self.stage_error:
            return restored(self.stage_error, self.process)
        whole = list(group) == list(range(len(group)))
        who = f"rank {self.process}" if whole else f"rank {self.process} of the job"
        doing = f" {self.where}" if self.where else ""
        if self.cause == Cause.STALLED:
            text = f"{who} has not answered in time{doing}"
            return StallError(f"{text}\n{self.text}" if self.text else text, peer=self.process)
        if self.cause == Cause.RAISED:
            kind, _, story = self.text.partition(": ")
            text = f"{who} has raised {kind}{doing}, and left the others behind"
            text = f"{text}: {story}" if story else text
        elif self.cause == Cause.CUT:
            text = f"the connection of {self.text} to {who} was reset{doing}, though both live"
            text += "; call reconnect() of the pipeline on every rank, and go on"
        else:
            text = f"{who} is lost{doing}: its process has ended, or cannot be reached"
            text += ". Look at its output; restart all ranks"
        return LostRankError(text, peer=self.process)


_STATE = (int, int, float, str, bool)
_SHAPES: dict[str, Any] = {
    "hello": ADDRESS,
    "beat": _STATE,
    "goodbye": None,
    "ask": int,
    "state": _STATE,
    "gone": (int, str),
    "came": (int, str, ADDRESS),
    "left": (int, (str, int, str, str, str), [str]),
}


def encode(kind: str, body: Any = None) -> bytes:
    """The bytes of a message, with their length first."""
    data = json.dumps([kind, body], default=astuple).encode()
    return LENGTH.pack(len(data)) + data


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
    if kind == "came":
        process, place, address = body
        return kind, (process, place, tuple(address))
    if kind == "left":
        process, (cause, *rest), places = body
        if cause not in list(Cause):
            raise JsonError(_WHAT, f"nothing is {cause[:40]!r}")
        return kind, (process, Verdict(Cause(cause), *rest), places)
    return kind, tuple(body) if isinstance(body, list) else body


class Heard(NamedTuple):
    """What was heard of a process last."""

    time: float
    """When the process has said so."""
    said: State
    came: float = 0.0
    """When this has arrived here; another process may have passed it on."""


class News:
    """The latest news of every process, as ``process`` has heard them by ``now()``."""

    def __init__(self, process: int, now: Callable[[], float]) -> None:
        self.state: Callable[[], tuple[str, bool]] = lambda: ("is not in a step", False)
        """What this process is doing, and whether that is a step."""
        self.here: set[int] = {process}
        """The processes that have come."""
        self.gone: dict[int, str] = {}
        """Why processes are not there any more."""
        self.heard: dict[int, Heard] = {}
        self._process, self._now, self._count = process, now, 0

    def own(self) -> State:
        """What this process is doing."""
        self._count += 1
        try:
            text, busy = self.state()
        except Exception as error:  # a failing look must not stop the control thread
            _log.debug("the control plane could not read what this process is doing: %s", error)
            text, busy = "cannot say what it is doing", True
        return State(self._process, self._count, 0.0, text[:_LONGEST_STATE], busy)

    def note(self, said: State) -> None:
        """Note what a process was doing, unless something newer is known."""
        known = self.heard.get(said.process)
        if said.process != self._process and (known is None or known.said.number < said.number):
            now = self._now()
            self.here.add(said.process)
            self.heard[said.process] = Heard(now - said.age, said, now)

    def silent(self, processes: Iterable[int]) -> list[State]:
        """What those of the processes did that have not said anything for a while."""
        return [
            last.said._replace(age=self._age(last))
            for process in processes
            if (last := self.heard.get(process)) and self._age(last) > SILENT_SECONDS
        ]

    def drop(self, processes: Iterable[int], seconds: float) -> None:
        """Forget what was heard of processes more than so many seconds ago."""
        until = self._now() - seconds
        for process in processes:
            if process in self.heard and self.heard[process].came < until:
                del self.heard[process]

    def lives(self, process: int) -> bool:
        """Whether a process has been heard of just now."""
        heard = self.heard.get(process)
        return heard is not None and self._age(heard) <= SILENT_SECONDS and process not in self.gone

    def report(self, processes: Iterable[int]) -> str:
        """A line for each of these processes: what it is doing."""
        return "\n".join(f"  rank {process}: {self._doing(process)}" for process in processes)

    def stalled(self, everyone: Collection[int], awaited: Collection[int], what: str) -> Verdict:
        """A verdict on the process that holds up the others: a silent, busy or absent one.

        It may be in none of the groups of this process: a rank that waits for it holds up others.
        Of several, it is one that is awaited here. If there is none, the verdict says so.
        """
        others = sorted(set(everyone) - {self._process})
        others.sort(key=lambda process: process not in awaited)
        signs: list[Callable[[Heard | None], bool]] = [
            lambda heard: heard is not None and self._age(heard) > SILENT_SECONDS,
            lambda heard: heard is not None and f": {COMPUTES}" in heard.said.text,
            lambda heard: heard is not None and not heard.said.busy,
            lambda heard: heard is None,
        ]
        suspects = [p for sign in signs for p in others if sign(self.heard.get(p))]
        suspects += self._elsewhere(others)
        where = f"rank {self._process} waits for {what}" if what else ""
        if not suspects:
            unknown = "all wait for each other: which rank holds them up cannot be told"
            where = f"{where}; {unknown}" if where else unknown
        report = self.report(sorted({*everyone, self._process}))[:_LONGEST]
        suspect = [*suspects, *others][0]
        return Verdict(Cause.STALLED, suspect, report, f"({where})" if where else "")

    def _age(self, heard: Heard) -> float:
        return self._now() - heard.time

    def _elsewhere(self, others: Collection[int]) -> list[int]:
        """The process that is in another call than all the others, if there is one."""
        calls = {p: self.heard[p].said.text.split(" for ")[0] for p in others if p in self.heard}
        counts = Counter([*calls.values(), self.own().text.split(" for ")[0]])
        alone = [p for p, call in calls.items() if counts[call] == 1]
        return alone if len(counts) == 2 and len(alone) == 1 else []

    def _doing(self, process: int) -> str:
        """What a process is doing, as far as it has said."""
        if process == self._process:
            return self.own().text
        if reason := self.gone.get(process):
            return f"{reason} (its process)"
        heard = self.heard.get(process)
        if heard is None:
            return "has sent nothing yet"
        if self._age(heard) <= SILENT_SECONDS:
            return heard.said.text
        silence = f"silent for {self._age(heard):.0f} seconds (stopped, or cut off)"
        return f"{silence}; then: {heard.said.text}"
