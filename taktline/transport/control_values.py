"""Values that processes tell each other over the control plane, such as addresses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

__all__ = ["Values"]


class Values:
    """The values of each process, by place: a text that names what they are for."""

    def __init__(self) -> None:
        self._told: dict[int, dict[str, str]] = {}
        self._changed = threading.Condition()

    def note(self, process: int, place: str, value: str) -> None:
        """Note the value of a process."""
        with self._changed:
            self._told.setdefault(process, {})[place] = value
            self._changed.notify_all()

    def forget(self, process: int) -> None:
        """Forget the values of a process that has left in the middle."""
        with self._changed:
            self._told.pop(process, None)

    def at(self, place: str) -> dict[int, str]:
        """The values at a place, by process."""
        with self._changed:
            return {p: values[place] for p, values in self._told.items() if place in values}

    def look_again(self) -> None:
        """Let every :meth:`gather` see whether it is over."""
        with self._changed:
            self._changed.notify_all()

    def gather(
        self, processes: Collection[int], place: str, seconds: float, is_over: Callable[[], bool]
    ) -> dict[int, str]:
        """Wait for the values of these processes at a place, and return them.

        Some are missing if ``is_over``, or after so many seconds. Otherwise this forgets them,
        and the place can be used again.
        """
        with self._changed:
            self._changed.wait_for(lambda: is_over() or self._has(processes, place), seconds)
            found = {p: value for p, value in self.at(place).items() if p in processes}
            if len(found) == len(processes):
                for process in processes:
                    del self._told[process][place]
            return found

    def _has(self, processes: Collection[int], place: str) -> bool:
        return all(place in self._told.get(process, {}) for process in processes)
