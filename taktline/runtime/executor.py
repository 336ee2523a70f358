"""Runs the flat program of one rank; if something fails, plays the rest for the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from taktline.errors import StageError, TaktlineError
from taktline.plan import Action
from taktline.runtime.ports import PeerFailed

__all__ = ["Failure", "Instruction", "Program", "Receiving", "Sending", "Wrap"]


class Sending(Protocol):
    """The sending end of a boundary."""

    def send(self, microbatch: int) -> None: ...
    def fail(self, microbatch: int) -> None: ...
    def settle(self, microbatch: int) -> None: ...
    def settle_all(self) -> None: ...


class Receiving(Protocol):
    """The receiving end of a boundary."""

    def post(self, microbatch: int) -> None: ...
    def discard(self, microbatch: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Instruction:
    """One action, resolved: what it does, and what others need of it if this rank has failed."""

    action: Action
    run: Callable[[], None]
    forgo: Callable[[], None] | None


Wrap: TypeAlias = Callable[[Instruction], Callable[[], None]]
"""Puts something around what an instruction runs."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A step that did not work on this rank; without an error, it was another rank's."""

    error: TaktlineError | None = None


class Program:
    """All that one rank does in a step, in order."""

    def __init__(
        self, rank: int, instructions: Sequence[Instruction], sending: Iterable[Sending]
    ) -> None:
        self._rank = rank
        self._instructions = instructions
        self._run = [instruction.run for instruction in instructions]
        self._sending = list(sending)

    def run(self, wrap: Wrap | None = None) -> Failure | None:
        """Run everything, with something around each instruction; None if it all worked."""
        runs = self._run if wrap is None else [wrap(each) for each in self._instructions]
        position = 0
        failure = None
        try:
            for position, run in enumerate(runs):  # noqa: B007
                run()
        except PeerFailed:
            failure = Failure()
        except Exception as error:
            failure = Failure(self._told(position, error))
        if failure is not None:
            self._play_on(position)
        for port in self._sending:
            port.settle_all()
        return failure

    def _play_on(self, position: int) -> None:
        """Take part in every message from here on, without computing, so that nobody hangs."""
        for instruction in self._instructions[position:]:
            if instruction.forgo is not None:
                instruction.forgo()

    def _told(self, position: int, error: Exception) -> StageError:
        action = self._instructions[position].action
        told = StageError(
            rank=self._rank,
            stage=action.stage,
            microbatch=action.microbatch,
            action=str(action),
            reason=f"{type(error).__name__}: {error}",
        )
        told.__cause__ = error
        return told
