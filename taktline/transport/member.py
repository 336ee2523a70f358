"""Who hears of what the control plane finds out: groups of processes, and steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from taktline.transport.verdict import Verdict

__all__ = ["Member", "Watched"]


class Member:
    """What has to know of a verdict: something that works with a group of processes.

    Args:
        processes: the group.
        leave: called once, on the plane's thread, so that whoever waits for the group leaves.
    """

    def __init__(self, processes: Sequence[int], leave: Callable[[Verdict], None]) -> None:
        self.processes = list(processes)
        self.leave = leave
        self.verdict: Verdict | None = None
        self.told = threading.Event()
        """Set once there is a verdict."""
        self.place = ""
        """Where its processes meet again."""
        self.absent: set[int] = set()
        """Those of them who have not come there yet."""


class Watched(Protocol):
    """A step that is running."""

    def tick(self) -> None:
        """Look at it; called some times a second."""
        ...
