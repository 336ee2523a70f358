"""What other processes have sent over the control plane: their state, and values."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from taktline.transport.control_messages import State
from taktline.transport.verdict import Cause, Verdict

SILENT_SECONDS = 2.0
"""After how long without a word a process counts as silent: that is four beats."""
COMPUTES, RESTS = "computes", "waits for a file, or an operation of torch"
"""What a process is doing that does not wait for others, as far as can be seen."""
_LONGEST = 50_000
"""The most characters of a report, so that it fits into a message."""
_LONGEST_STATE = 2000
_REMEMBERED = 1 << 14
"""Of how many places the number of the latest message is remembered."""

_log = logging.getLogger("taktline")


ENDED, LOST = "has ended", "is lost"
"""Why a process is not there any more: after a goodbye, or without."""


class Heard(NamedTuple):
    """What was heard of a process last: when it said so, what it was doing, whether in a step."""

    time: float
    state: str
    busy: bool
    number: int = 0
    """How often it has said what it is doing."""
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
        if said.process == self._process or (known is not None and known.number >= said.number):
            return False
        now = self._now()
        since = now - said.age
        self.heard[said.process] = Heard(since, said.text, said.busy, said.number, now)
        return True

    def silent(self, processes: Iterable[int]) -> list[State]:
        """What those of the processes did that have not said anything for a while."""
        said = {p: self.heard[p] for p in processes if p in self.heard}
        return [
            State(process, last.number, self._age(last), last.state, last.busy)
            for process, last in said.items()
            if self._age(last) > SILENT_SECONDS
        ]

    def drop(self, processes: Iterable[int], seconds: float) -> None:
        """Forget what was heard of processes more than so many seconds ago."""
        until = self._now() - seconds
        for process in processes:
            if process in self.heard and self.heard[process].came < until:
                del self.heard[process]

    def lives(self, process: int) -> bool:
        """Whether a process has been heard of just now."""
        said = self.heard.get(process)
        return said is not None and self._age(said) <= SILENT_SECONDS and process not in self.gone

    def _age(self, said: Heard) -> float:
        return self._now() - said.time

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
            lambda said: said is not None and self._age(said) > SILENT_SECONDS,
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
        counts = Counter([*calls.values(), self.own().text.split(" for ")[0]])
        alone = [p for p, call in calls.items() if counts[call] == 1]
        return alone if len(counts) == 2 and len(alone) == 1 else []

    def _told(self, process: int) -> str:
        """What a process is doing, as far as it has said."""
        if process == self._process:
            return self.own().text
        if reason := self.gone.get(process):
            return f"{reason} (its process)"
        said = self.heard.get(process)
        if said is None:
            return "has sent nothing yet"
        if self._age(said) <= SILENT_SECONDS:
            return said.state
        silence = f"silent for {self._age(said):.0f} seconds (stopped, or cut off)"
        return f"{silence}; then: {said.state}"


class Values:
    """The values of each process, by place: a text that names what they are for.

    Messages of a process may overtake each other on their ways. Their numbers tell which of those
    about a place is the latest.
    """

    def __init__(self) -> None:
        self._told: dict[str, dict[int, str]] = {}
        self._latest: dict[tuple[int, str], int] = {}
        """The number of the latest message of each process about a place, the oldest first."""
        self._left: dict[tuple[int, str], int] = {}
        """The number of the message by which a process has left a place."""
        self._changed = threading.Condition()

    def note(self, process: int, place: str, value: str, number: int) -> bool:
        """Note the value of a process; False if it came before, or the process has left since."""
        with self._changed:
            left = [
                at
                for (who, where), at in self._left.items()
                if who == process and is_in(place, where)
            ]
            if not self._is_new(process, place, number) or max(left, default=0) > number:
                return False
            self._told.setdefault(place, {})[process] = value
            self._changed.notify_all()
            return True

    def leave(self, process: int, left: str, number: int) -> bool:
        """Forget what a process has told at a place that it has left; False if that is old."""
        with self._changed:
            if not self._is_new(process, left, number):
                return False
            self._left[process, left] = number
        self.forget(process, left)
        return True

    def forget(self, process: int, left: str) -> None:
        """Forget the values of a process at a place, and at those inside of it."""
        with self._changed:
            for place, values in self._told.items():
                if is_in(place, left):
                    values.pop(process, None)

    def _is_new(self, process: int, place: str, number: int) -> bool:
        key = process, place
        if self._latest.get(key, 0) >= number:
            return False
        self._latest.pop(key, None)
        self._latest[key] = number
        if len(self._latest) > _REMEMBERED:
            del self._latest[next(iter(self._latest))]
        return True

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


def is_in(place: str, other: str) -> bool:
    """Whether a place is another one, or inside of it."""
    return f"{place}/".startswith(f"{other}/")
