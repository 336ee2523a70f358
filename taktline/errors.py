"""Every exception of Taktline.

::

    TaktlineError
    ├── PlanError           NoSuchRankError, InvalidPlanError
    ├── TransportError      DeadlockError, LostRankError, StallError
    ├── BatchError          BatchTypeError, InvalidBatchError
    ├── SignatureError      PipeliningMetadataError
    ├── of a call           ArgumentError, UseError, StageUseError, CallOrderError, InstallError,
    │                       TorchVersionError
    ├── of numbers          ScheduleError, CostError, PartitionError
    ├── of texts and files  ActionSyntaxError, PlanFileError, JsonError, CheckpointError
    └── of a step           StageError, MismatchError, DataError, LossError, SkipError, SplitError,
                            StateError, OffloadError

All of them are also a :class:`ValueError`, so code that does not know Taktline can catch them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal


class TaktlineError(ValueError):
    """The base of all errors of Taktline.

    >>> from taktline.plan import build
    >>> try:
    ...     build("1f1b", ranks=0, microbatches=8)
    ... except TaktlineError as error:
    ...     print(error)
    1f1b: ranks must be a whole number from 1 to 4,096, not 0
    """

    recoverable: Literal["step", "reconnect", "restart"] = "step"
    """How to go on: with the next step on the same objects (after ``zero_grad()``), with new
    connections (``pipe.reconnect()`` on every rank), or with new processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled by text and fields: what the constructor took is not kept.
        return restore, (type(self), self.args, self.__dict__)


def restore(cls: type[TaktlineError], args: tuple[Any, ...], fields: dict[str, Any]) -> Any:
    """Rebuild an error of another rank or process."""
    error = cls.__new__(cls, *args)
    error.__dict__.update(fields)
    return error


def text_of(error: object, most: int = 1 << 16) -> str:
    """The text of an error, cut to a length that can be sent; never raises.

    >>> text_of(ValueError("no"))
    'no'
    """
    try:
        text = str(error)
    except Exception as raised:  # a user's class may raise anything
        return f"(its text cannot be read: {type(raised).__name__})"
    # Halves of surrogate pairs cannot be sent.
    text = text.encode(errors="replace").decode()
    return text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters)"


class ArgumentError(TaktlineError, TypeError):
    """An argument of a function has a wrong type, or is out of range."""


class ActionSyntaxError(TaktlineError):
    """A text is not an action; ``position`` is the character where reading stopped."""

    def __init__(self, text: str, position: int, expected: str) -> None:
        self.text = text
        self.position = position
        self.expected = expected
        # Show only the text around the mistake, so that the caret fits on the line.
        left = max(0, position - 40)
        excerpt = text[left : position + 40].replace("\n", " ").replace("\t", " ")
        super().__init__(
            f"not an action: expected {expected} at character {position + 1}\n"
            f"  {excerpt}\n  {' ' * (position - left)}^"
        )


class BatchError(TaktlineError):
    """A batch cannot be cut into micro-batches, or their outputs cannot be merged."""


class _TextError(TaktlineError):
    """A text cannot be read; ``row`` and ``column`` count from 1, as editors do, if known."""

    def __init__(
        self, what: str | Path, reason: str, *, row: int | None = None, column: int | None = None
    ) -> None:
        self.reason = reason
        self.row = row
        self.column = column
        places = (("row", row), ("column", column))
        place = "".join(f", {name} {number}" for name, number in places if number is not None)
        super().__init__(f"{what}{place}: {reason}")


class PlanFileError(_TextError):
    """A plan file cannot be read."""


class JsonError(_TextError):
    """A text is not valid JSON, or not of the expected shape."""


class ScheduleError(TaktlineError):
    """A schedule's name is unknown, or its numbers do not fit; the text says which would."""


class CostError(TaktlineError):
    """Costs are not valid, or do not fit the plan."""


class PlanError(TaktlineError):
    """A plan is not consistent."""


class NoSuchRankError(PlanError, IndexError):
    """A plan has no such rank."""


class InvalidPlanError(PlanError):
    """A plan breaks rules; ``violations`` has all violations, the text the first few."""

    def __init__(self, plan_name: str, violations: Sequence[object]) -> None:
        self.violations = tuple(violations)
        count, shown = len(self.violations), [f"  {each}" for each in self.violations[:10]]
        if count > len(shown):
            shown.append(f"  and {count - len(shown)} more (see .violations)")
        text = f"plan {plan_name!r} is not valid: {count} violation{'s' * (count != 1)}"
        super().__init__("\n".join([text, *shown]))


class PartitionError(TaktlineError):
    """A model, or a list of layers, cannot be cut into stages as asked.

    If limits cannot be kept, ``stage`` lacks the most in the best cut, and ``short`` is how much.
    """

    def __init__(self, text: str, *, stage: int | None = None, short: float | None = None) -> None:
        self.stage = stage
        self.short = short
        super().__init__(text)


class MismatchError(TaktlineError):
    """The ranks disagree on a call or its arguments; every rank raises the same error."""


class DataError(TaktlineError):
    """A batch cannot be read; every rank raises the same, and the reading rank has the cause."""


class SignatureError(TaktlineError):
    """A value at the boundary of a stage is not the expected one, or cannot be sent."""

    differs: str = ""
    """Of a tensor that is not the expected one: "shape" or "dtype"."""


class SkipError(TaktlineError):
    """A skip connection was put and not got, or got and not put."""


class LossError(TaktlineError):
    """The loss is not one real number."""


class SplitError(TaktlineError):
    """The two halves of a split backward do not fit together."""


class OffloadError(TaktlineError):
    """What a forward has saved cannot be offloaded, or computed again."""


class UseError(TaktlineError):
    """A pipeline is used while it runs, after it was closed, or in an unsupported way."""


class StateError(TaktlineError):
    """The parameters of a stage cannot get their values."""


class CheckpointError(TaktlineError):
    """A checkpoint cannot be written or read, or does not fit; every rank raises the same error."""


class StageError(TaktlineError):
    """An action failed on one rank; every rank raises this at the end of the step.

    Gradients of that step are incomplete: call ``zero_grad()`` before the next one. On the rank
    that failed, ``__cause__`` is the original error.
    """

    def __init__(
        self, *, rank: int, stage: int, microbatch: int | None, action: str, reason: str
    ) -> None:
        self.rank = rank
        self.stage = stage
        self.microbatch = microbatch
        self.action = action
        self.reason = reason
        where = f"rank {rank}, stage {stage}"
        if microbatch is not None:
            where += f", micro-batch {microbatch}"
        super().__init__(f"{where} ({action}): {reason}")


class TransportError(TaktlineError):
    """Ranks cannot exchange messages; ``peer`` is the other rank, if it is known.

    Its number is that among all processes of the job.
    """

    def __init__(self, text: str, *, peer: int | None = None) -> None:
        self.peer = peer
        super().__init__(text)


class DeadlockError(TransportError):
    """Every rank waits for another; the text says which rank waits for which message."""

    recoverable = "restart"


class LostRankError(TransportError):
    """Another rank has ended, or cannot be reached any more."""

    recoverable = "restart"


class StallError(TransportError):
    """Another rank did not answer in time; the text says what all ranks were doing."""

    recoverable = "restart"


class InstallError(TaktlineError):
    """Taktline cannot take the place of torch.distributed.pipelining in this process."""


class TorchVersionError(TaktlineError):
    """A feature needs a private name of torch that the installed version lacks."""


# Code that is written for torch expects the builtin exceptions in these.


class InvalidBatchError(BatchError, AssertionError):
    """A batch, its chunk spec or its outputs do not fit together."""


class BatchTypeError(BatchError, TypeError):
    """An argument must be a list."""


class PipeliningMetadataError(SignatureError, RuntimeError):
    """Tensors at the boundary of a stage differ from the announced ones; named as in torch."""


class StageUseError(TaktlineError, RuntimeError):
    """A stage or a schedule of torch's interface is used in an unsupported way."""


class CallOrderError(TaktlineError, AssertionError):
    """A method of torch's interface is called before another that must come first."""


__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    name
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, TaktlineError) and name[0] != "_"
)
