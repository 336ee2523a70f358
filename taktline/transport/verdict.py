"""Why ranks cannot go on together: the first cause, which every rank reports."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from taktline.errors import (
    JsonError,
    LostRankError,
    MismatchError,
    StallError,
    TaktlineError,
)
from taktline.transport.exchange import restored

OUTSIDE = "outside of a step"
"""The place of a rank that has finished every exchange in which it took part."""


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
    APART = "apart"
    """It is in another call than others."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rank that has failed, by its number among all processes, and how.

    >>> print(Verdict(Cause.RAISED, 3, "KeyboardInterrupt", "in 2F0").error([2, 3]))
    rank 3 of the job has raised KeyboardInterrupt in 2F0, and left the others behind
    """

    cause: Cause
    process: int
    text: str = ""
    """The error that it has raised, the state of every rank, or the rank that cannot reach it."""
    where: str = ""
    """What it was doing."""
    stage_error: str = ""
    """The :class:`StageError` that it has raised, written, if it is one."""
    number: int = field(default_factory=lambda: secrets.randbits(62))
    """Identifies the verdict, which may arrive several times."""

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Verdict:
        """The verdict in a value of JSON, whose shape was checked."""
        if plain["cause"] not in list(Cause):
            raise JsonError("a verdict", f"nothing is {str(plain['cause'])[:40]!r}")
        return cls(**{**plain, "cause": Cause(plain["cause"])})

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
        if self.cause == Cause.APART:
            return MismatchError(self.text)
        if self.cause == Cause.RAISED:
            kind, _, story = self.text.partition(": ")
            text = f"{who} has raised {kind}{doing}, and left the others behind"
            return LostRankError(f"{text}: {story}" if story else text, peer=self.process)
        if self.cause == Cause.CUT:
            text = f"the connection of {self.text} to {who} was reset{doing}, though both live"
            text += "; call reconnect() of the pipeline on every rank, and go on"
            return LostRankError(text, peer=self.process)
        text = f"{who} is lost{doing}: its process has ended, or cannot be reached"
        return LostRankError(f"{text}. Look at its output; restart all ranks", peer=self.process)


class Member:
    """A group of processes of which this one is a part, and which leaves when it has a verdict.

    Args:
        processes: the group.
        place: where its processes meet; the same text on all of them.
        leave: called once, on the control thread, to end every wait for the group.
    """

    def __init__(
        self, processes: Sequence[int], place: str, leave: Callable[[Verdict], None]
    ) -> None:
        self.processes = list(processes)
        self.place = place
        self.leave = leave
        self.verdict: Verdict | None = None
        self.told = threading.Event()
        """Set once there is a verdict."""
        self.absent: set[int] = set()
        """The processes that have left the place, and have not come there again yet."""

    def is_concerned(self, verdict: Verdict, source: int) -> bool:
        """Whether a verdict is about this group, or comes from a process of it."""
        named = verdict.process in self.processes or source in self.processes
        return named and source not in self.absent
