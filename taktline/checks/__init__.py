"""Checks of arguments, JSON and environment variables. Nothing in here imports torch.

The check of an argument returns it, or raises an error that names it. They are for constructors and
calls by people; nothing of it runs within a step.
"""

from __future__ import annotations

import inspect
import math
import os
import reprlib
import warnings
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from taktline.checks.json_text import Either as Either
from taktline.checks.json_text import conform as conform
from taktline.checks.json_text import loads as loads
from taktline.checks.json_text import read as read
from taktline.checks.keywords import known_keywords as known_keywords
from taktline.errors import ArgumentError, TaktlineError

T = TypeVar("T")
_Error = type[TaktlineError]

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 80


def shown(value: object) -> str:
    """A value in an error: what Python writes, cut short, or its type if that fails.

    >>> shown("1f1b"), shown(range(3)), shown(10**9999)
    ("'1f1b'", 'range(0, 3)', 'an int')
    """
    try:
        return _brief.repr(value)
    except Exception:  # whatever a class does when it is printed; there is an error to report
        return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """A name after a or an.

    >>> with_article("list"), with_article("int")
    ('a list', 'an int')
    """
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def refuse(name: str, takes: str, value: object, error: _Error = ArgumentError) -> NoReturn:
    """Raise an error that says what an argument must be.

    >>> refuse("plan", "a Plan", None)
    Traceback (most recent call last):
    taktline.errors.ArgumentError: plan must be a Plan, not None
    """
    raise error(f"{name} must be {takes}, not {shown(value)}")


def require_whole(
    name: str,
    value: Any,
    *,
    least: int | None = None,
    most: int | None = None,
    error: _Error = ArgumentError,
) -> int:
    """A whole number, of Python or NumPy, within bounds; True and False are none.

    >>> require_whole("ranks", 4, least=1)
    4
    >>> require_whole("ranks", 0, least=1)
    Traceback (most recent call last):
    taktline.errors.ArgumentError: ranks must be a whole number from 1 up, not 0
    """
    if not isinstance(value, bool) and isinstance(value, Integral):
        number = int(value)
        if (least is None or least <= number) and (most is None or number <= most):
            return number
    refuse(name, "a whole number" + _range(least, most), value, error)


def require_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    error: _Error = ArgumentError,
) -> float:
    """A finite number as a float."""
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        above, below = least is None or least <= number, most is None or number <= most
        if math.isfinite(number) and above and below:
            return number
    refuse(name, "a number" + _range(least, most), value, error)


def require_flag(name: str, value: Any, error: _Error = ArgumentError) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        refuse(name, "True or False", value, error)
    return value


def require_text(name: str, value: Any, error: _Error = ArgumentError) -> str:
    """A text that can be written to a file."""
    if not isinstance(value, str):
        refuse(name, "a text", value, error)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        refuse(name, "a text without halves of surrogate pairs", value, error)
    return value


def require_instance(
    name: str,
    value: Any,
    kind: type[T] | tuple[type[T], ...],
    takes: str = "",
    error: _Error = ArgumentError,
) -> T:
    """A value of a type; ``takes`` says what that is, if its name does not."""
    if not isinstance(value, kind):
        refuse(name, takes or with_article(getattr(kind, "__name__", str(kind))), value, error)
    return value


def require_instances(
    name: str, values: Any, kind: type[T], error: _Error = ArgumentError
) -> list[T]:
    """A list of values of a type."""
    listed = require_iterable(name, values, f"a list, each {with_article(kind.__name__)}", error)
    return [
        require_instance(f"{name}[{index}]", value, kind, error=error)
        for index, value in enumerate(listed)
    ]


def require_iterable(
    name: str, values: Any, takes: str = "a list", error: _Error = ArgumentError
) -> list[Any]:
    """The values of something to iterate over; a text is none."""
    try:
        if not isinstance(values, (str, bytes, bytearray)):
            return list(iter(values))
    except TypeError:  # nothing to iterate over, or an array that turns out to be a number
        pass
    refuse(name, takes, values, error)


def require_callable(name: str, value: Any, error: _Error = ArgumentError) -> Callable[..., Any]:
    """Something to call."""
    if not callable(value):
        refuse(name, "a function", value, error)
    return value


def require_one_of(name: str, value: Any, choices: Sequence[T], error: _Error = ArgumentError) -> T:
    """One of a few values."""
    for choice in choices:
        # Not by equality alone: 1 equals True, and arrays compare by element.
        if value is choice or (type(value) is type(choice) and value == choice):
            return choice
    raise error(f"{name} is one of {', '.join(map(str, choices))}, not {shown(value)}")


def require_path(name: str, value: Any) -> Path:
    """The path of a file."""
    try:
        path = Path(value)
        if b"\0" not in os.fsencode(path):
            return path
    except (TypeError, ValueError):  # a path of bytes, or one that cannot be encoded
        pass
    refuse(name, "the path of a file", value)


def _range(least: float | None, most: float | None) -> str:
    if least is None:
        return ""
    return f" from {least:,} up" if most is None else f" from {least:,} to {most:,}"


def launched() -> bool:
    """Whether a launcher such as torchrun has started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def seconds_in_environment(name: str, default: float) -> float:
    """The number of seconds in an environment variable; anything else there is ignored.

    >>> seconds_in_environment("TAKTLINE_NO_SUCH_SECONDS", 60.0)
    60.0
    """
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isfinite(seconds) and seconds > 0:
        return seconds
    # A warning, as this may be read while modules are imported, where an error helps nobody.
    warn(
        f"{name}={shown(text)} is ignored: it must be a number of seconds, more than 0; "
        f"{default:g} are used",
        RuntimeWarning,
    )
    return default


_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the line outside of the package that has called it."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
