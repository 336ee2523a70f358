"""Errors of Taktline that are also the builtin ones that torch raises."""

from __future__ import annotations

from functools import cache
from typing import Any

from taktline.errors import PipeliningMetadataError, SignatureError, TaktlineError, restore


def as_in_torch(error: TaktlineError) -> TaktlineError:
    """The same error for code that expects the errors of torch.

    That is a RuntimeError, and a PipeliningMetadataError if a value has other metadata.

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
    return error if isinstance(error, kind) else _restored(type(error), kind, args, vars(error))


def _restored(cls: Any, kind: Any, args: tuple[Any, ...], fields: dict[str, Any]) -> Any:
    return restore(_both(cls, kind), args, fields)


@cache
def _both(cls: type[TaktlineError], kind: type[Exception]) -> type[TaktlineError]:
    def reduce(error: TaktlineError) -> tuple[Any, ...]:  # so that it can be pickled
        return _restored, (cls, kind, error.args, vars(error))

    attributes = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce__": reduce}
    return type(cls.__name__, (cls, kind), attributes)
