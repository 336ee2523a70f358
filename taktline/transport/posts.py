"""Numbers that ranks post at the end of a step, and read later, so that no rank waits for another.

::

    rank 0   step 1 ┐ step 2 ┐ step 3 ┐            ┐ posts its numbers
    rank 1       step 1 ┐ step 2 ┐ step 3 ┐        before step 3, all posts of step 1 are read

Posts go over the control plane. Its thread takes them in while a rank does anything else.

The ranks count what they do together: exchanges, and steps without one. A rank tells the others
of each exchange. So a rank that runs a step without an exchange sees if another one is in some
other call, and does not wait for it in vain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from taktline.transport.verdict import Cause, Verdict

if TYPE_CHECKING:
    from taktline.transport.distributed import Distributed


class Post:
    """What all ranks have posted at the end of one step."""

    def __init__(
        self,
        number: int,
        read: Callable[[], list[list[int]]],
        check: Callable[[list[list[int]]], None],
    ) -> None:
        self.number = number
        """The number of the step."""
        self._read = read
        self._check = check
        self._rows: list[list[int]] | None = None

    def read(self) -> list[list[int]]:
        """The numbers of every rank; waits for those that have not ended the step."""
        if self._rows is None:
            self._rows = self._read()
        return self._rows

    def check(self) -> None:
        """Raise if the ranks were in different steps."""
        self._check(self.read())


class Posts:
    """The posts of the ranks of a transport."""

    def __init__(self, transport: Distributed, place: str) -> None:
        """``place`` is the same text on each rank, and for no other connections."""
        self._transport = transport
        self._place = place
        self._count = 0
        """How many exchanges and steps there were."""
        self._running = 0
        """The number of the running step; 0 if none runs without an exchange."""
        self._unread: deque[Post] = deque()
        self.schedule = 0
        """The number of the schedule that was stepped last."""

    def before_exchange(self, what: str) -> None:
        """Read all posts, and tell the other ranks of an exchange."""
        self._settle(0)
        self._count += 1
        self._post(self._place, f"{self._count} {what}")

    def begin(self) -> None:
        """Begin a step without an exchange, at most one step ahead of the slowest rank."""
        self._settle(1)
        self._transport.open(())  # raises if a rank is lost
        self._count += 1
        self._running = self._count

    def end(self) -> None:
        """End the step, whether or not it has worked."""
        self._running = 0

    def post(self, numbers: Sequence[int], check: Callable[[list[list[int]]], None]) -> Post:
        """Post the numbers of this rank; ``check`` is called with those of all, before long."""
        place = f"{self._place}/{self._count}"
        self._post(place, " ".join(str(int(number)) for number in numbers))
        made = Post(self._count, lambda: self._gathered(place), check)
        self._unread.append(made)
        return made

    def _post(self, place: str, value: str) -> None:
        self._transport.plane.post(self._transport.processes, place, value)

    def stray(self) -> Verdict | None:
        """A verdict if a rank is in another call than the latest steps here."""
        transport = self._transport
        steps = {self._running, *(post.number for post in list(self._unread))}
        for process, told in transport.plane.told(self._place).items():
            number, _, what = told.partition(" ")
            if int(number) in steps:
                other = transport.processes.index(process)
                text = (
                    f"rank {transport.rank} is in a step, but rank {other} is in {what}, or has a "
                    "batch of another kind or size; make the same calls with the same batch on "
                    "every rank"
                )
                return Verdict(Cause.APART, process, text)
        return None

    def _settle(self, left: int) -> None:
        """Read all posts but the latest ones."""
        while len(self._unread) > left:
            try:
                self._unread[0].check()
            except BaseException:
                self._unread.clear()  # the error is about all of them
                raise
            self._unread.popleft()

    def _gathered(self, place: str) -> list[list[int]]:
        found = self._transport.gather(place)
        return [list(map(int, found[process].split())) for process in self._transport.processes]
