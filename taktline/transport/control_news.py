"""What other processes have said last, and what follows from it if one holds up the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from taktline.transport.verdict import Cause, Verdict

__all__ = ["Heard", "News"]

SILENT_SECONDS = 2.0
"""After how long without a word a process counts as silent: that is four beats."""
_LONGEST = 50_000
"""So many characters of a report fit into a message."""


class Heard(NamedTuple):
    """What another process has said last."""

    age: float
    """How long ago, in seconds."""
    state: str
    busy: bool
    """Whether it is in a step."""


class News:
    """The latest news of every process.

    Args:
        process: this one.
        state: what this process is doing, and whether that is a step.
    """

    def __init__(self, process: int, state: Callable[[], tuple[str, bool]]) -> None:
        self.gone: dict[int, str] = {}
        """Why processes are not there any more."""
        self._process = process
        self._state = state
        self._heard: dict[int, tuple[float, str, bool]] = {}

    def note(self, process: int, state: str, busy: bool) -> None:
        """A process has said what it is doing."""
        self._heard[process] = (time.monotonic(), state, busy)

    def of(self, process: int) -> Heard | None:
        """What a process has said last; None if nothing."""
        said = self._heard.get(process)
        return None if said is None else Heard(time.monotonic() - said[0], *said[1:])

    def lives(self, process: int) -> bool:
        """Whether a process has been heard of just now."""
        said = self.of(process)
        return said is not None and said.age <= SILENT_SECONDS and process not in self.gone

    def report(self, processes: Iterable[int]) -> str:
        """What each of some processes is doing, in a line each."""
        return "\n".join(f"  rank {process}: {self._told(process)}" for process in processes)

    def stalled(self, everyone: Collection[int], awaited: Collection[int], what: str) -> Verdict:
        """Who holds up the others: one that is silent, or computes, or is elsewhere.

        It may be in none of this process's groups: whoever waits for it holds up others. Of several
        it is one that is awaited here.
        """
        others = sorted(set(everyone) - {self._process})
        others.sort(key=lambda process: process not in awaited)
        signs: list[Callable[[Heard | None], bool]] = [
            lambda said: said is not None and said.age > SILENT_SECONDS,
            lambda said: said is not None and ": computes" in said.state,
            lambda said: said is not None and not said.busy,
            lambda said: said is None,
            lambda said: True,
        ]
        heard = {process: self.of(process) for process in others}
        suspect = next(p for sign in signs for p in others if sign(heard[p]))
        where = f"(rank {self._process} waits for {what})" if what else ""
        report = self.report(sorted({*everyone, self._process}))[:_LONGEST]
        return Verdict(Cause.STALLED, suspect, report, where)

    def _told(self, process: int) -> str:
        """What a process is doing, as far as it has said."""
        if process == self._process:
            return self._state()[0]
        if reason := self.gone.get(process):
            return f"{reason} (its process)"
        said = self.of(process)
        if said is None:
            return "has not been heard of"
        if said.age <= SILENT_SECONDS:
            return said.state
        silence = f"not heard of for {said.age:.0f} seconds (stopped, or cut off)"
        return f"{silence}; then: {said.state}"
