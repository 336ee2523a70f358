"""What each process is doing, as far as it has said, and who holds up the others."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from taktline.transport.links import State
from taktline.transport.verdict import Cause, Verdict

SILENT_SECONDS = 2.0
"""After how long without a word a process counts as silent: that is four beats."""
COMPUTES = "computes"
"""What a process is doing that does not wait for others, as far as can be seen."""
ENDED, LOST = "has ended", "is lost"
"""Why a process is not there any more: after a goodbye, or without."""
_LONGEST, _LONGEST_STATE = 50_000, 2000
"""The most characters of a report, which has to fit into a message, and of a state."""

_log = logging.getLogger("taktline")


class Heard(NamedTuple):
    """What was heard of a process last."""

    time: float
    """When the process has said so."""
    said: State
    came: float = 0.0
    """When this has arrived here; another process may have passed it on."""


class News:
    """The latest news of every process.

    Args:
        process: this one.
        state: what this process is doing, and whether that is a step.
        now: the time.
    """

    def __init__(
        self,
        process: int,
        state: Callable[[], tuple[str, bool]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.here: set[int] = {process}
        """The processes that have come."""
        self.gone: dict[int, str] = {}
        """Why processes are not there any more."""
        self.heard: dict[int, Heard] = {}
        self._process = process
        self._state = state
        self._now = now
        self._count = 0

    def own(self) -> State:
        """What this process is doing."""
        self._count += 1
        try:
            text, busy = self._state()
        except Exception as error:  # a failing look must not stop the control thread
            _log.debug("the control plane could not read what this process is doing: %s", error)
            text, busy = "cannot say what it is doing", True
        return State(self._process, self._count, 0.0, text[:_LONGEST_STATE], busy)

    def note(self, said: State) -> bool:
        """Note what a process was doing; False if something newer is known."""
        known = self.heard.get(said.process)
        if said.process == self._process or (
            known is not None and known.said.number >= said.number
        ):
            return False
        now = self._now()
        self.here.add(said.process)
        self.heard[said.process] = Heard(now - said.age, said, now)
        return True

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
