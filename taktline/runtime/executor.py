"""Runs the flat program of a process; if something fails, plays the rest for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from taktline.errors import StageError, TaktlineError, text_of
from taktline.plan import Action
from taktline.runtime.ports import PeerFailed

__all__ = ["Failure", "Fate", "Instruction", "Program", "Receiving", "Sending", "Wrap"]


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
    waits: str = ""
    """Whom it may have to wait for."""
    at: Callable[[], Action] | None = None
    """Of one that does several actions: which it has come to."""

    @property
    def running(self) -> Action:
        """The action that is running."""
        return self.action if self.at is None else self.at()


Wrap: TypeAlias = Callable[[Instruction], Callable[[], None]]
"""Puts something around what an instruction runs."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A step that did not work on this rank; without an error, it was another rank's."""

    error: TaktlineError | None = None


class Fate(Protocol):
    """Knows what an error means for the ranks together."""

    def judge(self, error: Exception, told: StageError | None) -> None:
        """Raise if the ranks cannot go on because of it; ``told`` is it with its place."""
        ...


class Program:
    """All that one rank does in a step, in order; or all that the ranks of one process do."""

    def __init__(
        self,
        rank_of: Sequence[int],
        instructions: Sequence[Instruction],
        sending: Iterable[Sending],
        joined: Callable[[], Sequence[Instruction]] | None = None,
    ) -> None:
        """``rank_of`` tells where each stage lies; ``joined`` does the same in fewer instructions.

        These are run unless somebody looks on, who is to see each action by itself.
        """
        self._rank_of = rank_of
        self._each = instructions
        self._joined = joined
        self._instructions = instructions
        """Those that are running."""
        self._sending = list(sending)
        self.position = 0
        """The instruction that is running."""

    @property
    def current(self) -> Instruction | None:
        """What is running; None once all of it has run."""
        left = self._instructions[self.position :]
        return left[0] if left else None

    def run(self, wrap: Wrap | None = None, fate: Fate | None = None) -> Failure | None:
        """Run everything, with something around each instruction; None if it all worked.

        Where the ranks cannot go on together it raises, and plays nothing on.
        """
        self._instructions = self._quickest() if wrap is None else self._each
        runs = [each.run if wrap is None else wrap(each) for each in self._instructions]
        failure = None
        try:
            for self.position, run in enumerate(runs):
                run()
            self.position = len(runs)
        except PeerFailed:
            failure = Failure()
        except Exception as error:
            if isinstance(error, TaktlineError) and error.recoverable != "step":
                raise  # nobody would answer what this rank still has to say
            told = self._told(self._instructions[min(self.position, len(runs) - 1)], error)
            if fate is not None:
                fate.judge(error, told)
            failure = Failure(told)
        if failure is not None:
            self._play_on(self.position, fate)
        return failure

    def run_alone(self, after: Callable[[], None]) -> None:
        """Run everything, and wait for what was sent; what goes wrong is raised, with its place.

        Nothing is played on: for a capture, in which nothing reaches the others. ``after`` is
        called after each instruction.
        """
        self._instructions = running = self._quickest()
        try:
            for self.position, instruction in enumerate(running):
                instruction.run()
                after()
        except Exception as error:
            raise self._told(running[self.position], error) from error
        self.settle()

    def forgo(self, fate: Fate | None = None) -> None:
        """Run nothing, but take part in every message."""
        self._play_on(0, fate)

    def settle(self) -> None:
        """Let go of what was sent; call it when every rank has ended, and all of it has arrived.

        Not before: gloo may lose track of a message whose connection ends, and wait for it in vain.
        """
        for port in self._sending:
            port.settle_all()

    def _quickest(self) -> Sequence[Instruction]:
        return self._each if self._joined is None else self._joined()

    def _play_on(self, position: int, fate: Fate | None) -> None:
        """Take part in every message from here on, without computing, so that nobody hangs."""
        for call in [instruction.forgo for instruction in self._instructions[position:]]:
            if call is None:
                continue
            try:
                call()
            except Exception as error:
                if isinstance(error, TaktlineError) and error.recoverable != "step":
                    raise
                if fate is not None:
                    fate.judge(error, None)

    def _told(self, instruction: Instruction, error: Exception) -> StageError:
        action = instruction.running
        told = StageError(
            rank=self._rank_of[action.stage],
            stage=action.stage,
            microbatch=action.microbatch,
            action=str(action),
            reason=f"{type(error).__name__}: {text_of(error)}",
        )
        told.__cause__ = error
        return told
