"""How the two ends of a gloo link find each other: over the control plane, not by the job's store.

gloo writes an address, and waits for that of the other end, in a store. This one ends that wait
when there is a verdict, and needs no host but those of the ranks.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from taktline.transport.control_plane import Member, Plane

__all__ = ["Rendezvous"]


class Rendezvous(Store):
    """As much of a store as gloo needs to connect processes, each with each other."""

    def __init__(
        self, plane: Plane, member: Member, processes: Sequence[int], place: str, seconds: float
    ) -> None:
        super().__init__()
        self._plane = plane
        self._member = member
        self._processes = processes
        self._place = place
        self._seconds = seconds
        self._found: dict[int, str] = {}

    @property
    def missing(self) -> list[int]:
        """The processes that have not come."""
        return [process for process in self._processes if process not in self._found]

    def set(self, key: str, value: bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Tell the others this rank's address."""
        self._plane.tell(self._processes, self._place, base64.b64encode(value).decode())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Wait for everybody's: once one of them connects, all must be there."""
        if self.missing:
            self._found = self._plane.gather(
                self._member, self._processes, self._place, self._seconds
            )
        if self.missing:
            raise RuntimeError(f"{self._place}: {self.missing} did not come")

    def get(self, key: str) -> bytes:
        """The address of a rank, by the last part of its key."""
        process = self._processes[int(key.rpartition("/")[2])]
        return base64.b64decode(self._found[process])
