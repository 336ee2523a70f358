"""Errors of code written for torch: Taktline's and, as torch raises them, builtin ones at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from taktline.errors import (
    BatchError,
    PlanError,
    SignatureError,
    SplitError,
    TaktlineError,
    restore,
)

__all__ = [
    "BatchTypeError",
    "CallOrderError",
    "InstallError",
    "InvalidActionError",
    "InvalidBatchError",
    "InvalidOrderError",
    "PipeliningMetadataError",
    "StageBackwardError",
    "StageUseError",
]


class InvalidActionError(PlanError, RuntimeError):
    """A text is not an action as torch writes them; torch raises RuntimeError.

    >>> raise InvalidActionError("Invalid computation type X")
    Traceback (most recent call last):
    taktline.errors.InvalidActionError: Invalid computation type X
    """


class InvalidOrderError(PlanError, AssertionError):
    """An order of actions that was written for torch cannot run; torch raises AssertionError.

    >>> raise InvalidOrderError("Schedule is missing actions for rank 1")
    Traceback (most recent call last):
    taktline.errors.InvalidOrderError: Schedule is missing actions for rank 1
    """


class InvalidBatchError(BatchError, AssertionError):
    """A batch, its chunk spec or its outputs do not fit together; torch raises AssertionError.

    >>> raise InvalidBatchError("Tensor size 3 is smaller than num_chunks")
    Traceback (most recent call last):
    taktline.errors.InvalidBatchError: Tensor size 3 is smaller than num_chunks
    """


class PipeliningMetadataError(SignatureError, RuntimeError):
    """Tensors at the boundary of a stage differ from what was announced; torch's name for it.

    >>> raise PipeliningMetadataError("stage 1 inputs: expected 1 tensors, got 2")
    Traceback (most recent call last):
    taktline.errors.PipeliningMetadataError: stage 1 inputs: expected 1 tensors, got 2
    """


class StageBackwardError(SplitError, RuntimeError):
    """The backward of a stage failed; the text shows what it was given.

    >>> raise StageBackwardError("Failed to run stage backward: ...")
    Traceback (most recent call last):
    taktline.errors.StageBackwardError: Failed to run stage backward: ...
    """


class BatchTypeError(BatchError, TypeError):
    """What must be a list is none.

    >>> raise BatchTypeError("losses must be a list but got a <class 'tuple'>")
    Traceback (most recent call last):
    taktline.errors.BatchTypeError: losses must be a list but got a <class 'tuple'>
    """


class StageUseError(TaktlineError, RuntimeError):
    """A stage or a schedule that torch's interface knows is used as it cannot be.

    >>> raise StageUseError("Chunk id 4 is out of range [0, 4)")
    Traceback (most recent call last):
    taktline.errors.StageUseError: Chunk id 4 is out of range [0, 4)
    """


class CallOrderError(TaktlineError, AssertionError):
    """A stage or a schedule that torch's interface knows is called before what it needs.

    >>> raise CallOrderError("can't get bwd output if this stage is first")
    Traceback (most recent call last):
    taktline.errors.CallOrderError: can't get bwd output if this stage is first
    """


class InstallError(TaktlineError):
    """Taktline cannot take the place of torch.distributed.pipelining in this process.

    >>> raise InstallError("torch.distributed.pipelining has been imported already")
    Traceback (most recent call last):
    taktline.errors.InstallError: torch.distributed.pipelining has been imported already
    """


for _name in __all__:
    globals()[_name].__module__ = "taktline.errors"  # where everybody finds them


def as_in_torch(error: TaktlineError) -> TaktlineError:
    """The same error for code that expects what torch raises in a step.

    That is a RuntimeError, and a PipeliningMetadataError if a value is not as it was.

    >>> from taktline.errors import MismatchError
    >>> error = as_in_torch(MismatchError("the ranks disagree"))
    >>> isinstance(error, RuntimeError), isinstance(error, MismatchError)
    (True, True)
    """
    args, kind = error.args, RuntimeError
    misfit = next((e for e in (error, error.__cause__) if isinstance(e, SignatureError)), None)
    if misfit is not None:
        kind = PipeliningMetadataError
        args = (f"{error} ({misfit.differs} mismatch)",) if misfit.differs else args
    if isinstance(error, kind):
        return error
    return restore(_both(type(error), kind), args, vars(error))


@cache
def _both(cls: type[TaktlineError], kind: type[Exception]) -> type[TaktlineError]:
    def reduce(self: TaktlineError) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _unpickled, (cls, kind, self.args, vars(self))

    attributes = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce__": reduce}
    return type(cls.__name__, (cls, kind), attributes)


def _unpickled(
    cls: type[TaktlineError], kind: type[Exception], args: tuple[Any, ...], fields: dict[str, Any]
) -> TaktlineError:
    return restore(_both(cls, kind), args, fields)
