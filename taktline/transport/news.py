"""The messages of the control plane, and what they say: what each process does, who has failed.

A message is a kind and a body, as JSON, with its length first. Neighbours tell each other::

    hello     the first message: where the sender can be called; then all facts that it knows
    state     what the sender is doing, twice a second

The others are facts. They stay true, everyone has to know them, and they are passed on::

    gone      that a process is not there any more, and why
    came      that a process has come to the place where a group meets, and its address
    left      that some process has left places because of a verdict, and that verdict
    ask       that a process asks what all are doing: for a while, states are passed on, too
    votes     with whom a process would go on without those that are lost, see ``election.py``
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from taktline.checks import conform, read
from taktline.errors import JsonError, LostRankError, StallError, TaktlineError
from taktline.transport.exchange import restored
from taktline.transport.sockets import ADDRESS, Address

SILENT_SECONDS = 2.0
"""After how long without a word a process counts as silent: that is four states."""
COMPUTES = "computes"
"""What a process is doing that does not wait for others, as far as can be seen."""
ENDED, LOST = "has ended", "is lost"
"""Why a process is not there any more: it has said goodbye, or has not."""
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


class Vote(NamedTuple):
    """With whom a process would go on."""

    process: int
    number: int
    """The last of its votes counts."""
    round: int
    """Of the election: each one makes a new world."""
    members: Sequence[int]
    dead: Sequence[int]
    """Those whose processes are known to have ended, so that they cannot go on without it."""
    store: Address
    """Where the store of the new world is, if this process is the first in it."""


_SHAPES: dict[str, Any] = {
    "hello": ADDRESS,
    "state": (int, int, float, str, bool),
    "ask": (int, int),
    "gone": (int, str),
    "came": (int, str, ADDRESS),
    "left": ((str, int, str, str, str), [str]),
    "votes": (int, int, int, [int], [int], ADDRESS),
}


def encode(kind: str, *body: Any) -> bytes:
    """The bytes of a message, with their length first."""
    data = json.dumps([kind, body], default=astuple).encode()
    return LENGTH.pack(len(data)) + data


def decode(message: bytes) -> tuple[str, Any]:
    """The kind and the body of a message; raises a :class:`JsonError` if it is none.

    >>> decode(encode("gone", 3, "is lost"))
    ('gone', (3, 'is lost'))
    """
    kind, body = read(message[LENGTH.size :], (str, object), what=_WHAT)
    if kind not in _SHAPES:
        raise JsonError(_WHAT, f"no kind is {kind[:40]!r}")
    conform(body, _SHAPES[kind], what=_WHAT)
    if kind == "state":
        return kind, State(*body)
    if kind == "came":
        process, place, address = body
        return kind, (process, place, tuple(address))
    if kind == "left":
        (cause, *rest), places = body
        if cause not in list(Cause):
            raise JsonError(_WHAT, f"nothing is {cause[:40]!r}")
        return kind, (Verdict(Cause(cause), *rest), places)
    if kind == "votes":
        *rest, store = body
        return kind, Vote(*rest, store=tuple(store))
    return kind, tuple(body)


_COMPUTE, _WAITS = (1, 2), 5
"""How innocent processes are that compute, in the user's code or elsewhere, or wait for others.

A wait in C++ looks like computing elsewhere.
"""
_NAMED = 8
"""How many ranks that compute are named."""


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
        self.refused: set[int] = set()
        """Those that this process has called where nobody listened: they cannot come back."""
        self.votes: dict[int, Vote] = {}
        """With whom processes would go on, in the latest election."""
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

    def note(self, said: State, since: float) -> bool:
        """Note what a process was doing; returns whether it had not been heard of since a time."""
        known, now = self.heard.get(said.process), self._now()
        is_old = known is not None and said.number < known.said.number
        if is_old or said.process == self._process:
            return False
        self.here.add(said.process)
        self.heard[said.process] = Heard(now - said.age, said, now)
        return known is None or known.came < since

    def dead(self) -> set[int]:
        """The processes that are known to have ended; others that are gone may only be cut off."""
        ended = {process for process, how in self.gone.items() if how == ENDED}
        return ended | self.refused & self.gone.keys()

    def forget(self, members: Iterable[int]) -> None:
        """Forget all processes but these."""
        self.here &= set(members)
        self.heard = {
            process: heard for process, heard in self.heard.items() if process in self.here
        }

    def unheard(self, processes: Iterable[int], since: float) -> bool:
        """Whether any of these processes has not been heard of since a time."""
        return any(p not in self.heard or self.heard[p].came < since for p in processes)

    def silent(self, processes: Iterable[int]) -> list[State]:
        """What those of the processes did that have not said anything for a while."""
        return [
            self.heard[process].said._replace(age=self._age(process))
            for process in processes
            if process in self.heard and self._age(process) > SILENT_SECONDS
        ]

    def lives(self, process: int) -> bool:
        """Whether a process has been heard of just now."""
        return self._age(process) <= SILENT_SECONDS and process not in self.gone

    def report(self, processes: Iterable[int]) -> str:
        """A line for each of these processes: what it is doing."""
        return "\n".join(f"  rank {process}: {self._doing(process)}" for process in processes)

    def stalled(self, everyone: Iterable[int], awaited: Collection[int], what: str) -> Verdict:
        """A verdict on the process that holds up the others: a silent, busy or absent one.

        It may be in none of the groups of this process: a rank that waits for it holds up others.
        Of several, it is one that is awaited here. If there is none, the verdict says so.
        """
        group = {*everyone, self._process}
        others = sorted(group - {self._process}, key=lambda p: (p not in awaited, p))
        suspect = min(others, key=self._innocence)
        least, unknown = self._innocence(suspect), ""
        alike = [p for p in others if p != suspect and self._innocence(p) == least]
        if least == _WAITS:
            elsewhere = self._elsewhere(others)
            suspect = suspect if elsewhere is None else elsewhere
            if elsewhere is None:
                unknown = "all wait for each other: which rank holds them up cannot be told"
        elif least in _COMPUTE and alike:
            names = " and ".join(f"rank {process}" for process in alike[:_NAMED])
            also = "computes" if len(alike) == 1 else "compute"
            unknown = f"{names} {also}, too: which of them holds up the others cannot be told"
        waits = f"rank {self._process} waits for {what}" if what else ""
        where = "; ".join(filter(None, (waits, unknown)))
        report = self.report(sorted(group))[:_LONGEST]
        return Verdict(Cause.STALLED, suspect, report, f"({where})" if where else "")

    def _innocence(self, process: int) -> int:
        """How little speaks for it that a process holds up the others."""
        if process not in self.heard:
            return _WAITS - 1
        said = self.heard[process].said
        computes = [f": {COMPUTES}," in said.text, f": {COMPUTES}" in said.text]
        signs = [self._age(process) > SILENT_SECONDS, *computes, not said.busy]
        return signs.index(True) if any(signs) else _WAITS

    def _elsewhere(self, others: Collection[int]) -> int | None:
        """The process that is in another call than all the others, if there is one."""
        said = {p: self.heard[p].said.text for p in others} | {self._process: self.own().text}
        calls = {process: text.split(" for ")[0] for process, text in said.items()}
        counts = Counter(calls.values())
        alone = [process for process in others if counts[calls[process]] == 1]
        return alone[0] if len(counts) == 2 and len(alone) == 1 else None

    def _age(self, process: int) -> float:
        """How many seconds ago a process has said what it does."""
        return self._now() - self.heard[process].time if process in self.heard else math.inf

    def _doing(self, process: int) -> str:
        """What a process is doing, as far as it has said."""
        if process == self._process:
            return self.own().text
        if reason := self.gone.get(process):
            return f"{reason} (its process)"
        if process not in self.heard:
            return "has sent nothing yet"
        said, age = self.heard[process].said.text, self._age(process)
        if age <= SILENT_SECONDS:
            return said
        return f"silent for {age:.0f} seconds (stopped, or cut off); then: {said}"
