"""The processes that save and load a model together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from taktline.errors import CheckpointError, MismatchError, TaktlineError, text_of
from taktline.transport import Transport
from taktline.transport.exchange import restored, retold, share_values, written
from taktline.transport.one_rank import Alone


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes along each dimension of a mesh, which save and load together."""

    transports: Sequence[Transport] = (Alone(),)

    @property
    def sizes(self) -> list[int]:
        """How many processes there are along each dimension."""
        return [transport.size for transport in self.transports]

    @property
    def count(self) -> int:
        """How many processes there are."""
        return prod(self.sizes)

    @property
    def place(self) -> int:
        """The number of this process."""
        place, size = 0, 1
        for transport in self.transports:
            place, size = place + transport.rank * size, size * transport.size
        return place

    def attempt(self, do: Callable[[], Any], what: str) -> tuple[Any, TaktlineError | None]:
        """The result of a function, or the error of a disk or a user's code, with the rank."""
        who = f"rank {self.place}: " if self.count > 1 else ""
        try:
            return do(), None
        except TaktlineError as error:
            text = text_of(error)
            return None, retold(error, text if text.startswith("rank ") else f"{who}{text}")
        except Exception as error:
            kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
            reason = getattr(error, "strerror", None) or text_of(error)
            found = CheckpointError(f"{who}cannot {what}: {kind}{reason}")
            found.__cause__ = error
            return None, found

    def everywhere(self, do: Callable[[], Any], what: str, call: str) -> list[Any]:
        """The results of all processes, as JSON, in the order of their numbers.

        An error of one is raised on all, and so is one about processes in different calls.
        """
        result, error = self.attempt(do, what)
        told = "" if error is None else written(error)
        rows = [[told, result]]
        for transport in self.transports:
            try:
                shared = share_values(transport, rows, [(str, object)], call, what=call)
                rows = [row for each in shared for row in each]
            except MismatchError as apart:  # processes along the other dimensions must know
                error, told = apart, written(apart)
                rows = [[told, None]]
        for place, (text, _) in enumerate(rows):
            if text:
                raise error if error is not None and text == told else restored(text, place)
        return [each for _, each in rows]


def writers(listed: Sequence[Sequence[tuple[str, int]]]) -> dict[str, int]:
    """The process that writes each key: that with the highest priority, or the first.

    >>> writers([[("embed", 0), ("mean", 0)], [("embed", -1), ("mean", 1)]])
    {'embed': 0, 'mean': 1}
    """
    best: dict[str, tuple[int, int]] = {}
    for place, process in enumerate(listed):
        for key, priority in process:
            best[key] = max(best.get(key, (priority, -place)), (priority, -place))
    return {key: -place for key, (_, place) in best.items()}
