"""Checks of arguments, JSON and environment variables. Nothing in here imports torch.

The check of an argument returns it, or raises an error that names it. They are for constructors and
calls by people: what has passed one is not checked again, and nothing of it runs within a step.

JSON from outside must have the shape that is asked for, written as the types that a value is made
of::

    int                 a whole number of at most 64 bits; no bool
    float               any number that is finite
    [str]               a list of texts
    (str, int)          a list of a text and a number
    {"a": int}          an object with exactly this key
    {str: int}          an object with any keys
    Either(int, None)   one of several shapes
    object              anything
"""

from __future__ import annotations

import inspect
import json
import math
import os
import reprlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

from taktline.errors import ArgumentError, JsonError, TaktlineError

T = TypeVar("T")
_Error: TypeAlias = type[TaktlineError]

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
    """A name after a or an."""
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def refuse(name: str, takes: str, value: object, error: _Error = ArgumentError) -> NoReturn:
    """Raise an error that says what an argument must be."""
    raise error(f"{name} must be {takes}, not {shown(value)}")


def check(
    name: str,
    value: Any,
    kind: type[T] | tuple[type[T], ...],
    takes: str = "",
    *,
    least: float | None = None,
    most: float | None = None,
    error: _Error = ArgumentError,
) -> T:
    """An argument, if it is of a kind; ``takes`` says what that is, if the kind's name does not.

    ``int`` and ``float`` are finite numbers of Python or NumPy, within bounds, and no bool; ``str``
    is a text that can be written to a file.

    >>> check("ranks", 4, int, least=1)
    4
    >>> check("ranks", 0, int, least=1)
    Traceback (most recent call last):
    taktline.errors.ArgumentError: ranks must be a whole number from 1 up, not 0
    """
    with suppress(TypeError, OverflowError, UnicodeError):
        found = _converted(value, kind)
        if (least is None or found >= least) and (most is None or found <= most):
            return found
    takes = takes or _TAKES.get(kind) or with_article(getattr(kind, "__name__", str(kind)))
    if least is not None:
        takes += f" from {least:,} up" if most is None else f" from {least:,} to {most:,}"
    refuse(name, takes, value, error)


_TAKES: dict[Any, str] = {
    **{int: "a whole number", float: "a number", bool: "True or False", str: "a text"},
    Path: "the path of a file",
}


def _converted(value: Any, kind: Any) -> Any:
    """The value as a kind; raises if it is none."""
    if kind is Path:
        path = Path(value)
        if b"\0" in os.fsencode(path):
            raise TypeError
        return path
    if kind is str:
        str.encode(value)  # not if it has halves of surrogate pairs
        return value
    takes: Any = {int: Integral, float: Real}.get(kind, kind)
    if not isinstance(value, takes) or (takes is not kind and isinstance(value, bool)):
        raise TypeError
    if kind is float and not math.isfinite(value):
        raise TypeError
    return value if takes is kind else kind(value)


def check_list(
    name: str,
    values: Any,
    kind: type = object,
    *,
    takes: str = "",
    error: _Error = ArgumentError,
) -> list[Any]:
    """The values of anything to iterate over, but of no text, each of a kind."""
    found: list[Any] | None = None
    with suppress(TypeError):  # nothing to iterate over, or an array that turns out to be a number
        if not isinstance(values, (str, bytes, bytearray)):
            found = list(iter(values))
    if found is None:
        each = "" if kind is object else f", each {with_article(kind.__name__)}"
        refuse(name, takes or f"a list{each}", values, error)
    if kind is object:
        return found
    return [check(f"{name}[{i}]", value, kind, error=error) for i, value in enumerate(found)]


def check_callable(name: str, value: Any, error: _Error = ArgumentError) -> Callable[..., Any]:
    """Something to call."""
    return value if callable(value) else refuse(name, "a function", value, error)


def check_one_of(name: str, value: Any, choices: Sequence[T], error: _Error = ArgumentError) -> T:
    """One of a few values."""
    for choice in choices:
        # Not by equality alone: 1 equals True, and arrays compare by element.
        if value is choice or (type(value) is type(choice) and value == choice):
            return choice
    raise error(f"{name} is one of {', '.join(map(str, choices))}, not {shown(value)}")


def launched() -> bool:
    """Whether a launcher such as torchrun has started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def number_in_environment(name: str, default: float, of: str = "seconds") -> float:
    """The number in an environment variable, more than 0."""
    with suppress(ValueError):
        if 0 < (number := float(os.environ.get(name, default))) < math.inf:
            return number
    refuse(name, f"a number of {of}, more than 0", os.environ[name])


_PACKAGE = f"{Path(__file__).parent}{os.sep}"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the line outside of the package that has called it."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


MAX_DEPTH = 64
"""The deepest nesting of lists and objects that is read; what we write is about five deep."""


def loads(text: str | bytes, *, what: str) -> Any:
    """The value of a JSON text in UTF-8; ``what`` names the text in errors.

    >>> loads('{"version": 1', what="the header")
    Traceback (most recent call last):
    taktline.errors.JsonError: the header, row 1, column 14: not JSON: Expecting ',' delimiter
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        value = json.loads(text, parse_constant=int)  # which refuses NaN and Infinity
        # Halves of surrogate pairs are no characters, and could not be written.
        json.dumps(value, ensure_ascii=False).encode()
        if _depth(value) > MAX_DEPTH:
            raise RecursionError
        return value
    except json.JSONDecodeError as error:
        place = {"row": error.lineno, "column": error.colno}
        raise JsonError(what, f"not JSON: {error.msg}", **place) from None
    except (ValueError, RecursionError) as error:
        deep = f"nested deeper than {MAX_DEPTH} levels"
        reason = deep if isinstance(error, RecursionError) else error
        raise JsonError(what, f"not JSON: {reason}") from None


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

    >>> read('{"ranks": [0, "1"]}', {"ranks": [int]}, what="a message")
    Traceback (most recent call last):
    taktline.errors.JsonError: a message: ranks[1] is a text, not a whole number
    """
    return conform(loads(text, what=what), shape, what=what)


def conform(value: Any, shape: Any, *, what: str) -> Any:
    """The value, if it has the shape; raises a :class:`JsonError` otherwise."""
    if difference := _difference(value, shape, ""):
        raise JsonError(what, difference)
    return value


_NAMES: dict[Any, str] = {
    **{int: "a whole number", float: "a number", str: "a text", bool: "true or false"},
    **{type(None): "null", list: "a list", dict: "an object"},
}


def _difference(value: Any, shape: Any, path: str) -> str:
    """What of a value is not as in the shape; empty if nothing is."""
    where, kind = path or "the value", _NAMES[type(value)]
    if isinstance(shape, Either):
        fits = any(not _difference(value, each, path) for each in shape.shapes)
        return "" if fits else f"{where} is {kind}, which does not fit here"
    wanted: Any = shape if isinstance(shape, type) else cast(Any, type)(shape)
    wanted = list if wanted is tuple else wanted
    takes: Any = {object: tuple(_NAMES), float: (int, float)}.get(wanted, (wanted,))
    if kind not in [_NAMES[each] for each in takes]:
        return f"{where} is {kind}, not {_NAMES[wanted]}"
    if shape is int and not -(2**63) <= value < 2**63:
        return f"{where} has more than 64 bits"
    if kind == "a number" and not math.isfinite(value):
        return f"{where} is {value}, not a finite number"
    inner: list[tuple[Any, Any, str]] = []
    if isinstance(shape, (list, tuple)):
        shapes = list(cast("Sequence[Any]", shape))
        if isinstance(shape, tuple) and len(value) != len(shapes):
            return f"{where} has {len(value)} entries, not {len(shapes)}"
        shapes *= len(value) if isinstance(shape, list) else 1
        inner = [(x, s, f"{path}[{i}]") for i, (x, s) in enumerate(zip(value, shapes, strict=True))]
    elif isinstance(shape, dict):
        fields = cast("dict[Any, Any]", shape)
        fields = dict.fromkeys(value, fields[str]) if str in fields else fields
        if value.keys() != fields.keys():
            return f"{where} has the keys {_listed(value)}, not {_listed(fields)}"
        prefix = f"{path}." if path else ""
        inner = [(item, fields[key], f"{prefix}{key[:40]}") for key, item in value.items()]
    return next(filter(None, (_difference(*each) for each in inner)), "")


def _listed(keys: dict[str, Any]) -> str:
    names = ", ".join(repr(key[:40]) for key in list(keys)[:8])
    return f"{names} …" if len(keys) > 8 else names or "none"
