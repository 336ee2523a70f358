"""Which schedule it is: ranks that have made several must step the same one.

A schedule is made by each rank for itself, so nothing but its place among the others tells which
one it is before its first step. In that step the ranks agree on a number.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from taktline.transport import Transport, local
from taktline.transport.distributed import Distributed

__all__ = ["Identity"]


class Identity:
    """One schedule of this rank; ``group`` are the ranks that it was made for.

    >>> first, second = local.run(lambda rank: [Identity(None), Identity(None)], 1)[0]
    >>> first.waiting(first.maker), second.waiting(second.maker)
    ((2, 0), (2, 1))
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.number = 0
        """What the ranks have agreed on in the first step; 0 before it."""
        self.maker = local.current()
        if self.maker is None and group is None and dist.is_available() and dist.is_initialized():
            group = dist.distributed_c10d._get_default_group()
        self._made = _Made.of(self.maker or group)
        self._made.waiting.append(ref(self))

    def waiting(self, transport: Transport) -> tuple[int, int]:
        """How many schedules wait for their first step, and which of them this one is."""
        here = None if isinstance(transport, Distributed) else transport
        waiting = [each for known in self._made.waiting if (each := known()) is not None]
        # Local ranks whose schedules were all made in one place cannot be told apart by that.
        if self.number or self.maker is not here:
            return 0, 0
        return len(waiting), waiting.index(self)

    def next_number(self) -> int:
        """What this rank would call it."""
        return self._made.numbered + 1

    def adopt(self, number: int) -> None:
        """Be called so from now on, on every rank."""
        self.number = self._made.numbered = number
        self._made.waiting = [each for each in self._made.waiting if each() not in (None, self)]


class _Made:
    """The schedules that this rank has made for the same ranks."""

    def __init__(self) -> None:
        self.waiting: list[ref[Identity]] = []
        self.numbered = 0

    @classmethod
    def of(cls, ranks: object) -> _Made:
        return cls() if ranks is None else _known.setdefault(ranks, cls())


_known: WeakKeyDictionary[object, _Made] = WeakKeyDictionary()
