"""The messages of the control plane, and what they say: what each process does, who has failed.

A message is a kind and a body, as JSON, with its length first. The first one on a socket is a hello
with the sender's address. All others are for everyone::

    here      that a process has come, and its address
    gone      that a process is not there any more, and why
    left      that some process has left places because of a verdict, and that verdict
    state     what a process is doing, told from time to time

All but the last are facts. They stay true, so that their order does not matter.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

from taktline.checks import conform, read
from taktline.errors import JsonError, LostRankError, StallError, TaktlineError
from taktline.transport.exchange import restored
from taktline.transport.sockets import ADDRESS, Address

STATE_SECONDS = 0.5
"""How often a process tells what it does. With very many it is less often, see :class:`News`."""
ENDED, LOST = "has ended", "is lost"
"""Why a process is not there any more: it has said goodbye, or has not."""
OUTSIDE = "outside of a step"
"""The place of a rank that has finished every exchange in which it took part."""
LENGTH = struct.Struct("<I")
_LONGEST, _LONGEST_STATE = 50_000, 2000
"""The most characters of a report, which has to fit into a message, and of a state."""
_WHAT = "a message of the control plane"
_NAMED = 8
"""How many ranks that compute are named."""

_log = logging.getLogger("taktline")


class Does(IntEnum):
    """What a process does, by how likely it is that others wait for it."""

    SILENT = 0
    """It has not said anything for a while."""
    COMPUTES = 1
    """It computes in the user's code."""
    RUNS = 2
    """It computes elsewhere, as far as can be seen; it may be a wait in C++."""
    IDLE = 3
    """It is not in a step."""
    WAITS = 4
    """It waits for others."""


class State(NamedTuple):
    """What a process has said that it is doing."""

    process: int
    number: int
    """How often it has said so."""
    text: str
    does: int
    """One of :class:`Does`."""


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


_SHAPES: dict[str, Any] = {
    "hello": (int, ADDRESS),
    "here": (int, ADDRESS),
    "gone": (int, str),
    "state": (int, int, str, int),
    "left": ((str, int, str, str, str), [str]),
}


def encode(kind: str, *body: Any) -> bytes:
    """The bytes of a message, with their length first."""
    data = json.dumps([kind, body], default=astuple).encode()
    return LENGTH.pack(len(data)) + data


def decode(message: bytes) -> tuple[str, Any]:
    """The kind and the body of a message; raises a :class:`JsonError` if it is none.

    >>> decode(encode("gone", 3, "is lost"))
    ('gone', [3, 'is lost'])
    """
    kind, body = read(message[LENGTH.size :], (str, object), what=_WHAT)
    if kind not in _SHAPES:
        raise JsonError(_WHAT, f"no kind is {kind[:40]!r}")
    conform(body, _SHAPES[kind], what=_WHAT)
    if kind == "left":
        (cause, *rest), places = body
        if cause not in list(Cause):
            raise JsonError(_WHAT, f"nothing is {cause[:40]!r}")
        body = Verdict(Cause(cause), *rest), places
    return kind, body


class News:
    """The latest news of each of ``size`` processes, as ``process`` has heard them by ``now()``.

    Everyone hears the states of everyone, so each tells its own the less often the more there are:
    the control plane of 1,024 processes takes about a hundredth of a core. A process is known to
    be silent after four states that did not come.
    """

    def __init__(self, process: int, size: int, now: Callable[[], float]) -> None:
        self.state: Callable[[], tuple[str, int]] = lambda: ("is not in a step", Does.IDLE)
        """What this process is doing: a text, and one of :class:`Does`."""
        self.period = STATE_SECONDS * max(1.0, size / 8)
        """After how long a process tells anew what it does."""
        self.here: dict[int, Address] = {}
        """The processes that have come, and where they are called."""
        self.gone: dict[int, str] = {}
        """Why processes are not there any more."""
        self.heard: dict[int, tuple[float, State]] = {}
        """What each process has said last, and when that was heard."""
        self._process, self._now, self._count = process, now, 0

    def own(self) -> State:
        """What this process is doing."""
        self._count += 1
        try:
            text, does = self.state()
        except Exception as error:  # a failing look must not stop the control thread
            _log.debug("the control plane could not read what this process is doing: %s", error)
            text, does = "cannot say what it is doing", Does.WAITS
        return State(self._process, self._count, text[:_LONGEST_STATE], does)

    def note(self, said: State) -> bool:
        """Note what a process does; returns whether that is news."""
        known = self.heard.get(said.process)
        if known is not None and said.number <= known[1].number:
            return False
        self.heard[said.process] = self._now(), said
        return True

    def lives(self, process: int) -> bool:
        """Whether a process has come, and has not fallen silent."""
        return process in self.here and process not in self.gone and not self._silence(process)

    def report(self, processes: Iterable[int]) -> str:
        """A line for each of these processes: what it is doing."""
        return "\n".join(f"  rank {process}: {self._doing(process)}" for process in processes)

    def stalled(self, processes: Iterable[int], awaited: Collection[int], what: str) -> Verdict:
        """A verdict on the process that holds up the others: a silent, busy or absent one.

        It may be none of ``processes``, which wait: a rank that waits for it holds up others. Of
        several, it is one that is awaited here. If there is none, the verdict says so.
        """
        everyone = sorted({*self.here, *processes})
        does = {process: self._does(process) for process in everyone if process != self._process}
        suspect = min(does, key=lambda process: (does[process], process not in awaited, process))
        alike = [p for p in does if does[p] == does[suspect] and p != suspect][:_NAMED]
        where = [f"rank {self._process} waits for {what}"] if what else []
        if does[suspect] == Does.WAITS:
            where.append("all wait for each other: which rank holds them up cannot be told")
        elif alike and does[suspect] in (Does.COMPUTES, Does.RUNS):
            names = " and ".join(f"rank {process}" for process in alike)
            also = "computes" if len(alike) == 1 else "compute"
            where.append(f"{names} {also}, too: which of them holds up the others cannot be told")
        text = self.report(everyone)[:_LONGEST]
        return Verdict(Cause.STALLED, suspect, text, f"({'; '.join(where)})" if where else "")

    def _does(self, process: int) -> int:
        if self._silence(process):
            return Does.SILENT
        return self.heard[process][1].does if process in self.heard else Does.IDLE

    def _silence(self, process: int) -> float:
        """For how many seconds a process has been silent; 0 if it is not."""
        age = self._now() - self.heard[process][0] if process in self.heard else 0.0
        return age if age > 4 * self.period else 0.0

    def _doing(self, process: int) -> str:
        """What a process is doing, as far as it has said."""
        if process == self._process:
            return self.own().text
        if reason := self.gone.get(process):
            return f"{reason} (its process)"
        if process not in self.heard:
            return "has sent nothing yet"
        said, silence = self.heard[process][1].text, self._silence(process)
        if not silence:
            return said
        return f"silent for {silence:.0f} seconds (stopped, or cut off); then: {said}"
