"""Where ranks leave word of themselves, for others to read without their help."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from taktline.checks import read
from taktline.errors import JsonError

__all__ = ["Board", "Word"]


class Word(NamedTuple):
    """What a rank has said."""

    age: float
    """How long ago, in seconds."""
    text: str
    busy: bool
    """Whether it will say more soon."""


class Board:
    """One line for each rank, in the store through which the ranks have found each other.

    >>> from torch.distributed import HashStore
    >>> board = Board(HashStore(), rank=0, size=2)
    >>> board.write("all is well")
    >>> [word and word.text for word in board.read()]
    ['all is well', None]
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def write(self, text: str, *, busy: bool = True) -> None:
        """Replace this rank's line."""
        # By the clock on the wall, the only one that hosts have in common.
        self._store.set(f"board/{self._rank}", json.dumps([time.time(), text, busy]))

    def read(self) -> list[Word | None]:
        """What each rank has said last; None from one that has not said anything."""
        return [self._line(f"board/{rank}") for rank in range(self._size)]

    def _line(self, key: str) -> Word | None:
        if not self._store.check([key]):
            return None
        try:
            said, text, busy = read(self._store.get(key), (float, str, bool), what=key)
        except JsonError:
            return None
        return Word(max(0.0, time.time() - said), text, busy)
