"""The flat program of a process: runs its instructions; after a failure, only its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from taktline.errors import StageError, TaktlineError, text_of
from taktline.plan import Action


class PeerFailed(Exception):
    """The sender of a message has failed; it reports why at the end of the step."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One action, resolved to a function."""

    action: Action
    run: Callable[[], None]
    forgo: Callable[[], None] | None
    """Replaces ``run`` once this rank has failed: the part that other ranks need."""
    waits: str = ""
    """What the action may have to wait for, in words."""
    at: Callable[[], Action] | None = None
    """Where one instruction does several actions: returns the one that is running."""

    @property
    def running(self) -> Action:
        """The action that is running."""
        return self.action if self.at is None else self.at()


Wrap: TypeAlias = Callable[[Instruction], Callable[[], None]]
"""Returns a function that runs an instruction and observes it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A step that failed on this rank; without an error, another rank has the error."""

    error: TaktlineError | None = None


Fate: TypeAlias = Callable[[Exception, StageError | None], None]
"""Raises if the ranks cannot go on after an error, also given with its rank and stage."""


class Program:
    """All actions of one rank in a step, in order; or of all ranks of one process."""

    def __init__(
        self,
        rank_of: Sequence[int],
        instructions: Sequence[Instruction],
        settles: Iterable[Callable[[], None]],
        joined: Callable[[], Sequence[Instruction]] | None = None,
    ) -> None:
        """``rank_of`` has the rank of each stage; ``settles`` wait for all sends of a port.

        ``joined`` returns fewer, equal instructions. They run unless each action is observed by
        itself.
        """
        self._rank_of = rank_of
        self._each = instructions
        self._joined = joined
        self._instructions = instructions
        """The instructions of the current run."""
        self._settles = list(settles)
        self.position = 0
        """The instruction that is running."""

    @property
    def current(self) -> Instruction | None:
        """The instruction that is running; None after the last."""
        left = self._instructions[self.position :]
        return left[0] if left else None

    def run(self, wrap: Wrap | None = None, fate: Fate | None = None) -> Failure | None:
        """Run all instructions, each wrapped; returns None if all worked.

        Raises if the ranks cannot go on together.
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
                raise  # the other ranks have left this step
            located = self._located(self._instructions[min(self.position, len(runs) - 1)], error)
            if fate is not None:
                fate(error, located)
            failure = Failure(located)
        if failure is not None:
            self._play_on(self.position, fate)
        return failure

    def actions(self) -> list[Action]:
        """The actions of an unobserved run, in order; one for each instruction."""
        return [instruction.action for instruction in self._quickest()]

    def run_alone(self, before: Callable[[Action], None], after: Callable[[], None]) -> None:
        """Run all instructions and wait for all sends; raises the first error with its place.

        For a capture, in which no message reaches another rank. ``before`` and ``after`` are called
        around each instruction.
        """
        self._instructions = running = self._quickest()
        try:
            for self.position, instruction in enumerate(running):
                before(instruction.action)
                instruction.run()
                after()
        except Exception as error:
            raise self._located(running[self.position], error) from error
        self.settle()

    def forgo(self, fate: Fate | None = None) -> None:
        """Compute nothing, but take part in every message."""
        self._play_on(0, fate)

    def settle(self) -> None:
        """Wait for all sends and free their buffers; only after every rank has ended the step.

        Not earlier: gloo may lose track of a message whose connection ends, and wait for ever.
        """
        for settle in self._settles:
            settle()

    def _quickest(self) -> Sequence[Instruction]:
        return self._each if self._joined is None else self._joined()

    def _play_on(self, position: int, fate: Fate | None) -> None:
        """Take part in the messages from a position on, so that no other rank hangs."""
        for call in [instruction.forgo for instruction in self._instructions[position:]]:
            if call is None:
                continue
            try:
                call()
            except Exception as error:
                if isinstance(error, TaktlineError) and error.recoverable != "step":
                    raise
                if fate is not None:
                    fate(error, None)

    def _located(self, instruction: Instruction, error: Exception) -> StageError:
        action = instruction.running
        rank = self._rank_of[action.stage]
        return stage_error(error, rank, action.stage, action.microbatch, str(action))


def stage_error(
    error: Exception, rank: int, stage: int, microbatch: int | None, action: str
) -> StageError:
    """An error with the rank, stage and action where it was raised."""
    located = StageError(
        rank=rank,
        stage=stage,
        microbatch=microbatch,
        action=action,
        reason=f"{type(error).__name__}: {text_of(error)}",
    )
    located.__cause__ = error
    return located
