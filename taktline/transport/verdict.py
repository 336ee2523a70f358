"""Why ranks cannot go on together: the first cause, which every rank reports."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from taktline.errors import LostRankError, StallError, TaktlineError
from taktline.transport.exchange import restored
from taktline.transport.sockets import Address, purpose_of

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
    def loss(cls, process: int) -> Verdict:
        """The verdict on a process that has ended: the same on all that notice it."""
        return cls(Cause.LOST, process, number=-1 - process)

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


class Member:
    """A group of processes of which this one is a part, and which leaves when it has a verdict.

    Args:
        processes: the group.
        name: the same on all of its processes, and on no other group.
        leave: called once, on any thread, to end every wait for the group.
    """

    def __init__(
        self, processes: Sequence[int], name: str, leave: Callable[[Verdict], None]
    ) -> None:
        self.processes = list(processes)
        self.place = purpose_of(name).hex()
        """Where its processes meet."""
        self.leave = leave
        self.verdict: Verdict | None = None
        self.heard = threading.Event()
        """Set once there is a verdict."""
        self.meeting = ""
        """What tells the latest meeting of its processes from all others; the same on each."""
        self.addresses: dict[int, Address] = {}
        """Where they are called."""
        self.met: dict[int, int] = {}
        """The numbers with which they came to it."""
        self.past: dict[int, int] | None = None
        """The number of the latest coming of each, when this process has left; None before."""
