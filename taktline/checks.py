"""Checks of arguments, JSON and environment variables. Nothing in here imports torch.

The check of an argument returns it, or raises an error that names it. They are for constructors and
calls by people; nothing of it runs within a step.

JSON from outside is read strictly, and has the shape that it must have. A shape is written as the
types that a value is made of::

    int                 a whole number of at most 64 bits; no bool
    float               any number
    [str]               a list of texts
    (str, int)          a list of a text and a number
    {"a": int}          an object with exactly this key
    {str: int}          an object with any keys
    Either(int, None)   one of several shapes
    object              anything
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import re
import reprlib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

from taktline.errors import ArgumentError, JsonError, TaktlineError
from taktline.text import did_you_mean

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_Error: TypeAlias = type[TaktlineError]
_Bound: TypeAlias = float | None

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
    least: _Bound = None,
    most: _Bound = None,
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
    least: _Bound = None,
    most: _Bound = None,
    error: _Error = ArgumentError,
) -> float:
    """A finite number as a float."""
    if not isinstance(value, bool) and isinstance(value, Real):
        with suppress(OverflowError):
            number = float(value)
            above, below = least is None or least <= number, most is None or number <= most
            if math.isfinite(number) and above and below:
                return number
    refuse(name, "a number" + _range(least, most), value, error)


def _range(least: _Bound, most: _Bound) -> str:
    if least is None:
        return ""
    return f" from {least:,} up" if most is None else f" from {least:,} to {most:,}"


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
    with suppress(TypeError):  # nothing to iterate over, or an array that turns out to be a number
        if not isinstance(values, (str, bytes, bytearray)):
            return list(iter(values))
    refuse(name, takes, values, error)


def require_flag(name: str, value: Any, error: _Error = ArgumentError) -> bool:
    """True or False."""
    return require_instance(name, value, bool, "True or False", error)


def require_text(name: str, value: Any, error: _Error = ArgumentError) -> str:
    """A text that can be written to a file."""
    try:
        require_instance(name, value, str, "a text", error).encode("utf-8")
    except UnicodeEncodeError:
        refuse(name, "a text without halves of surrogate pairs", value, error)
    return value


def require_callable(name: str, value: Any, error: _Error = ArgumentError) -> Callable[..., Any]:
    """Something to call."""
    return value if callable(value) else refuse(name, "a function", value, error)


def require_one_of(name: str, value: Any, choices: Sequence[T], error: _Error = ArgumentError) -> T:
    """One of a few values."""
    for choice in choices:
        # Not by equality alone: 1 equals True, and arrays compare by element.
        if value is choice or (type(value) is type(choice) and value == choice):
            return choice
    raise error(f"{name} is one of {', '.join(map(str, choices))}, not {shown(value)}")


def require_path(name: str, value: Any) -> Path:
    """The path of a file."""
    with suppress(TypeError, ValueError):  # a path of bytes, or one that cannot be encoded
        path = Path(value)
        if b"\0" not in os.fsencode(path):
            return path
    refuse(name, "the path of a file", value)


def known_keywords(function: F) -> F:
    """Let an unknown keyword raise an error with the known ones; of a class, in its constructor.

    >>> @known_keywords
    ... def build(name, *, microbatches=1): ...
    >>> build("1f1b", micro_batches=8)
    Traceback (most recent call last):
    taktline.errors.ArgumentError: build() takes no 'micro_batches'; did you mean 'microbatches'?
    """
    if isinstance(function, type):
        made = cast(Any, function)
        made.__init__ = known_keywords(made.__init__)
        return made
    parameters = inspect.signature(function).parameters.values()
    known = [each.name for each in parameters if each.name != "self"]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return function
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        for unknown in [name for name in kwargs if name not in known]:
            raise ArgumentError(f"{name}() takes no {unknown!r}; {did_you_mean(unknown, known)}")
        return function(*args, **kwargs)

    return cast(F, called)


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
    with suppress(ValueError):
        seconds = float(text)
        if math.isfinite(seconds) and seconds > 0:
            return seconds
    # A warning, as this may be read while modules are imported, where an error helps nobody.
    warn(
        f"{name}={shown(text)} is ignored: it must be a number of seconds, more than 0; "
        f"{default:g} are used",
        RuntimeWarning,
    )
    return default


_PACKAGE = f"{Path(__file__).parent}{os.sep}"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the line outside of the package that has called it."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


MAX_DEPTH = 64
"""The deepest nesting of lists and objects that is read; what we write is about five deep."""

MAX_DIGITS = 640
"""The most digits of a whole number: what Python reads under all of its settings."""

# How an escaped half of a surrogate pair begins; whole pairs are common in texts of any script.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(text: str | bytes, *, what: str) -> Any:
    """The value of a JSON text; ``what`` names the text in errors.

    Stricter than Python's own reader: UTF-8 only, no key twice in an object, no NaN or infinity,
    no number or nesting without bounds, no halves of surrogate pairs.

    >>> loads('{"version": 1}', what="the header")
    {'version': 1}
    >>> loads('{"version": 1, "version": 2}', what="the header")
    Traceback (most recent call last):
    taktline.errors.JsonError: the header: has the key "version" twice in one object
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(
            text,
            object_pairs_hook=_no_key_twice,
            parse_int=_whole_number,
            parse_float=_fraction,
            parse_constant=lambda name: _refuse(f"holds {name}, which is not JSON"),
        )
        # Encoding fails at a half of a surrogate pair, written as it is or as an escape.
        text.encode("utf-8")
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        if _depth(value) > MAX_DEPTH:
            raise RecursionError
        return value
    except json.JSONDecodeError as error:
        place = {"row": error.lineno, "column": error.colno}
        raise JsonError(what, f"not JSON: {error.msg}", **place) from None
    except UnicodeDecodeError as error:
        reason = f"is not a text in UTF-8 (byte {error.start})"
    except UnicodeEncodeError:
        reason = "holds half of a surrogate pair, which is not a character"
    except RecursionError:
        reason = f"is nested deeper than {MAX_DEPTH} levels"
    except _Refused as error:
        reason = str(error)
    raise JsonError(what, reason)


class _Refused(Exception):
    """A value that Python's reader takes, and this one does not."""


def _refuse(reason: str) -> NoReturn:
    raise _Refused(reason)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        _refuse(f"has the key {json.dumps(twice[:60])} twice in one object")
    return fields


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        _refuse(f"holds a number of {len(digits)} digits; at most {MAX_DIGITS} are read")
    return int(digits)


def _fraction(digits: str) -> float:
    if math.isinf(number := float(digits)):
        _refuse(f"holds the number {digits[:60]}, which is too large")
    return number


def _depth(value: Any) -> int:
    """How many lists and objects lie in each other."""
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if not isinstance(value, list):
        return 0
    return 1 + max(map(_depth, cast("list[Any]", value)), default=0)


class Either:
    """One of several shapes."""

    def __init__(self, *shapes: Any) -> None:
        self.shapes = shapes


def read(text: str | bytes, shape: Any, *, what: str) -> Any:
    """The value of a JSON text that has a shape.

    >>> read('{"ranks": [0, 1]}', {"ranks": [int]}, what="a message")
    {'ranks': [0, 1]}
    >>> read('{"ranks": [0, "1"]}', {"ranks": [int]}, what="a message")
    Traceback (most recent call last):
    taktline.errors.JsonError: a message: ranks[1] is a text, not a whole number
    """
    return conform(loads(text, what=what), shape, what=what)


def conform(value: Any, shape: Any, *, what: str) -> Any:
    """The value, if it has the shape; raises a :class:`JsonError` otherwise."""
    try:
        _check(value, shape, "")
    except _Refused as error:
        raise JsonError(what, str(error)) from None
    return value


_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
    list: "a list",
    dict: "an object",
}


def _check(value: Any, shape: Any, path: str) -> None:
    """Raise the difference between a value and a shape, if there is one."""
    where, kind = path or "the value", _NAMES[type(value)]
    if isinstance(shape, Either):
        for each in shape.shapes:
            with suppress(_Refused):
                return _check(value, each, path)
        _refuse(f"{where} is {kind}, which does not fit here")
    wanted: Any = cast(Any, type)(shape) if isinstance(shape, (list, tuple, dict)) else shape
    wanted = list if wanted is tuple else type(None) if wanted is None else wanted
    if wanted is not object and type(value) not in ((int, float) if wanted is float else (wanted,)):
        _refuse(f"{where} is {kind}, not {_NAMES[wanted]}")
    if shape is int and not -(2**63) <= value < 2**63:
        _refuse(f"{where} has more than 64 bits")
    if isinstance(shape, tuple) and len(value) != len(cast(Any, shape)):
        _refuse(f"{where} has {len(value)} entries, not {len(cast(Any, shape))}")
    if isinstance(shape, (list, tuple)):
        shapes = cast(Any, shape) * (len(value) if isinstance(shape, list) else 1)
        for index, (item, inner) in enumerate(zip(value, shapes, strict=True)):
            _check(item, inner, f"{path}[{index}]")
    elif isinstance(shape, dict):
        fields = cast("dict[Any, Any]", shape)
        shapes = dict.fromkeys(value, fields[str]) if str in fields else fields
        if value.keys() != shapes.keys():
            _refuse(f"{where} has the keys {_listed(value)}, not {_listed(shapes)}")
        for key, item in value.items():
            _check(item, shapes[key], f"{path}.{key[:40]}" if path else key[:40])


def _listed(keys: dict[str, Any]) -> str:
    names = ", ".join(repr(key[:40]) for key in list(keys)[:8])
    return f"{names} …" if len(keys) > 8 else names or "none"
