"""Why ranks cannot go on together: the first cause, as every rank is told it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from taktline.checks import Either, read
from taktline.errors import JsonError, LostRankError, StallError, TransportError

__all__ = ["Cause", "Verdict"]


class Cause(StrEnum):
    """What has happened to a rank."""

    LOST = "lost"
    """Its process has ended, or its connections were reset."""
    RAISED = "raised"
    """It has raised an error and left the others behind."""
    STALLED = "stalled"
    """It did not answer in time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What has become of a rank, by its number among all processes.

    >>> verdict = Verdict(Cause.RAISED, 3, "KeyboardInterrupt", "in 2F0")
    >>> Verdict.from_text(verdict.to_text()) == verdict
    True
    >>> print(verdict.error([2, 3]))
    rank 1 has raised KeyboardInterrupt in 2F0, and left the others behind
    """

    cause: Cause
    process: int
    text: str = ""
    """What it has raised, or what every rank was doing."""
    where: str = ""
    """What it was doing."""

    def to_text(self) -> str:
        """For the wire."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Verdict:
        """From the wire; raises a :class:`JsonError` if it is none."""
        return cls.from_plain(read(text, _SHAPE, what="a verdict"))

    @classmethod
    def from_plain(cls, plain: dict[str, object]) -> Verdict:
        """From a value that has its shape."""
        if plain["cause"] not in list(Cause):
            raise JsonError("a verdict", f"nothing is {str(plain['cause'])[:40]!r}")
        fields = {**plain, "cause": Cause(str(plain["cause"]))}
        return cls(**fields)  # pyright: ignore[reportArgumentType]

    def error(self, group: Sequence[int]) -> TransportError:
        """The error to raise in a group of processes, whose ranks are called by their place."""
        peer = group.index(self.process) if self.process in group else None
        who = f"rank {peer}" if peer is not None else f"process {self.process} of the job"
        doing = f" {self.where}" if self.where else ""
        if self.cause == Cause.STALLED:
            text = f"{who} has not answered in time{doing}"
            return StallError(f"{text}\n{self.text}" if self.text else text, peer=peer)
        if self.cause == Cause.RAISED:
            text = f"{who} has raised {self.text}{doing}, and left the others behind"
            return LostRankError(text, peer=peer)
        text = f"{who} is lost{doing}: its process has ended, or cannot be reached"
        return LostRankError(f"{text}. Look at its output; start all ranks anew", peer=peer)


_SHAPE = {"cause": str, "process": int, "text": str, "where": Either(str)}
