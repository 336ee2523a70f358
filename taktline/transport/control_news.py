"""What other processes have sent over the control plane: their state, and values."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from taktline.transport.verdict import Cause, Verdict

SILENT_SECONDS = 2.0
"""After how long without a word a process counts as silent: that is four beats."""
COMPUTES, RESTS = "computes", "waits for a file, or an operation of torch"
"""What a process is doing that does not wait for others, as far as can be seen."""
_LONGEST = 50_000
"""The most characters of a report, so that it fits into a message."""
_LONGEST_STATE = 2000

_log = logging.getLogger("taktline")


class Heard(NamedTuple):
    """The last heartbeat of a process: when it came, what it was doing, and whether in a step."""

    time: float
    state: str
    busy: bool

    @property
    def age(self) -> float:
        """How long ago it came, in seconds."""
        return time.monotonic() - self.time


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
        self.heard: dict[int, Heard] = {}

    def own(self) -> tuple[str, bool]:
        """What this process is doing, and whether that is a step."""
        try:
            state, busy = self._state()
        except Exception as error:  # a failing look must not stop the control thread
            _log.debug("the control plane could not read what this process is doing: %s", error)
            return "cannot say what it is doing", True
        return state[:_LONGEST_STATE], busy

    def lives(self, process: int) -> bool:
        """Whether a process has been heard of just now."""
        said = self.heard.get(process)
        return said is not None and said.age <= SILENT_SECONDS and process not in self.gone

    def report(self, processes: Iterable[int]) -> str:
        """A line for each of these processes: what it is doing."""
        return "\n".join(f"  rank {process}: {self._told(process)}" for process in processes)

    def stalled(self, everyone: Collection[int], awaited: Collection[int], what: str) -> Verdict:
        """A verdict on the process that holds up the others: a silent, busy or absent one.

        It may be in none of the groups of this process: a rank that waits for it holds up others.
        Of several, it is one that is awaited here. If there is none, the verdict says so.
        """
        others = sorted(set(everyone) - {self._process})
        others.sort(key=lambda process: process not in awaited)
        signs: list[Callable[[Heard | None], bool]] = [
            lambda said: said is not None and said.age > SILENT_SECONDS,
            lambda said: said is not None and f": {COMPUTES}" in said.state,
            lambda said: said is not None and not said.busy,
            lambda said: said is None,
            lambda said: said is not None and f": {RESTS}" in said.state,
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

    def _elsewhere(self, others: Collection[int]) -> list[int]:
        """The process that is in another call than all the others, if there is one."""
        calls = {p: self.heard[p].state.split(" for ")[0] for p in others if p in self.heard}
        counts = Counter([*calls.values(), self.own()[0].split(" for ")[0]])
        alone = [p for p, call in calls.items() if counts[call] == 1]
        return alone if len(counts) == 2 and len(alone) == 1 else []

    def _told(self, process: int) -> str:
        """What a process is doing, as far as it has said."""
        if process == self._process:
            return self.own()[0]
        if reason := self.gone.get(process):
            return f"{reason} (its process)"
        said = self.heard.get(process)
        if said is None:
            return "has sent nothing yet"
        if said.age <= SILENT_SECONDS:
            return said.state
        silence = f"silent for {said.age:.0f} seconds (stopped, or cut off)"
        return f"{silence}; then: {said.state}"


class Values:
    """The values of each process, by place: a text that names what they are for."""

    def __init__(self) -> None:
        self._told: dict[str, dict[int, str]] = {}
        self._changed = threading.Condition()

    def note(self, process: int, place: str, value: str) -> None:
        """Note the value of a process."""
        with self._changed:
            self._told.setdefault(place, {})[process] = value
            self._changed.notify_all()

    def forget(self, process: int, left: str) -> None:
        """Forget the values of a process at a place that it has left, and at those inside of it."""
        with self._changed:
            for place, values in self._told.items():
                if f"{place}/".startswith(f"{left}/"):
                    values.pop(process, None)

    def of(self, process: int) -> dict[str, str]:
        """The values of a process, by place."""
        with self._changed:
            return {p: values[process] for p, values in self._told.items() if process in values}

    def at(self, place: str) -> dict[int, str]:
        """The values at a place, by process."""
        with self._changed:
            return dict(self._told.get(place, {}))

    def look_again(self) -> None:
        """Let every :meth:`gather` see whether it is over."""
        with self._changed:
            self._changed.notify_all()

    def gather(
        self, processes: Collection[int], place: str, seconds: float, is_over: Callable[[], bool]
    ) -> dict[int, str]:
        """Wait for the values of these processes at a place, and return them.

        Some are missing if ``is_over``, or after ``seconds``. Otherwise this forgets them,
        and the place can be used again.
        """
        with self._changed:
            everyone = {*processes}
            self._changed.wait_for(lambda: is_over() or self.at(place).keys() >= everyone, seconds)
            found = self.at(place)
            if found.keys() >= everyone:
                del self._told[place]
            return found
