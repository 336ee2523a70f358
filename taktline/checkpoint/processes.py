"""The processes that save and load a model together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from taktline.checks import Either
from taktline.errors import CheckpointError, MismatchError, TaktlineError, text_of
from taktline.transport import Transport
from taktline.transport.exchange import retold, share_error, share_values
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

    def gather(self, value: Any, call: str) -> list[Any]:
        """The JSON values of all processes, in the order of their numbers."""
        values, apart = [value], None
        for transport in self.transports:
            try:
                mine, shape = None if apart else values, Either([object], None)
                rows = share_values(transport, mine, shape, call, what=call)
                if None in rows:
                    apart = share_error(transport, apart)
                else:
                    values = [each for row in rows for each in row]
            except MismatchError as error:
                apart = apart or error  # processes along the other dimensions must know
        if apart is not None:
            raise apart
        return values

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
        """The results of all processes, as JSON; an error of one is raised on all."""
        result, error = self.attempt(do, what)
        results = self.gather([error is None, result], call)
        if not all(done for done, _ in results):
            for transport in self.transports:
                error = share_error(transport, error) or error
        if error is not None:
            raise error
        return [each for _, each in results]


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
