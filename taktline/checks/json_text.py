"""Reads JSON from outside strictly, and checks that it has the shape that it must have.

A shape is written as the types that a value is made of::

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

import json
import math
import re
from collections import Counter
from contextlib import suppress
from typing import Any, NoReturn, cast

from taktline.errors import JsonError

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
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_no_key_twice,
            parse_int=_whole_number,
            parse_float=_fraction,
            parse_constant=_constant,
        )
        # Encoding fails at a half of a surrogate pair, written as it is or as an escape.
        text.encode("utf-8")
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        if _depth(value) > MAX_DEPTH:
            raise RecursionError
    except json.JSONDecodeError as error:
        raise JsonError(
            what, f"not JSON: {error.msg}", row=error.lineno, column=error.colno
        ) from None
    except UnicodeDecodeError as error:
        raise JsonError(what, f"is not a text in UTF-8 (byte {error.start})") from None
    except UnicodeEncodeError:
        raise JsonError(what, "holds half of a surrogate pair, which is not a character") from None
    except RecursionError:
        raise JsonError(what, f"is nested deeper than {MAX_DEPTH} levels") from None
    except _Refused as error:
        raise JsonError(what, str(error)) from None
    return value


class _Refused(Exception):
    """A part of a text that Python's reader takes, and this one does not."""


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise _Refused(f"has the key {json.dumps(twice[:60])} twice in one object")
    return fields


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _Refused(f"holds a number of {len(digits)} digits; at most {MAX_DIGITS} are read")
    return int(digits)


def _fraction(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _Refused(f"holds the number {digits[:60]}, which is too large")
    return number


def _constant(name: str) -> NoReturn:
    raise _Refused(f"holds {name}, which is not JSON")


def _depth(value: Any) -> int:
    """How many lists and objects lie in each other."""
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if not isinstance(value, list):
        return 0
    return 1 + max(map(_depth, cast("list[Any]", value)), default=0)


_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    None: "null",
    list: "a list",
    dict: "an object",
}


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


def _check(value: Any, shape: Any, path: str) -> None:
    """Raise the difference between a value and a shape, if there is one."""
    if isinstance(shape, Either):
        for each in shape.shapes:
            with suppress(_Refused):
                return _check(value, each, path)
        _refuse(path, f"is {_kind(value)}, which does not fit here")
    if isinstance(shape, (list, tuple)):
        _check_list(value, cast(Any, shape), path)
    elif isinstance(shape, dict):
        _check_object(value, cast(Any, shape), path)
    elif shape is int and type(value) is int and not -(2**63) <= value < 2**63:
        _refuse(path, "has more than 64 bits")
    elif shape is not object:
        types = (int, float) if shape is float else (shape,)
        if type(value) not in types and not (value is shape is None):
            _refuse(path, f"is {_kind(value)}, not {_NAMES[shape]}")


def _check_list(value: Any, shape: list[Any] | tuple[Any, ...], path: str) -> None:
    if not isinstance(value, list):
        _refuse(path, f"is {_kind(value)}, not a list")
    items = cast("list[Any]", value)
    if isinstance(shape, tuple) and len(items) != len(shape):
        _refuse(path, f"has {len(items)} entries, not {len(shape)}")
    shapes = shape if isinstance(shape, tuple) else shape * len(items)
    for index, (item, inner) in enumerate(zip(items, shapes, strict=True)):
        _check(item, inner, f"{path}[{index}]")


def _check_object(value: Any, shape: dict[Any, Any], path: str) -> None:
    if not isinstance(value, dict):
        _refuse(path, f"is {_kind(value)}, not an object")
    fields = cast("dict[str, Any]", value)
    shapes = dict.fromkeys(fields, shape[str]) if str in shape else shape
    if fields.keys() != shapes.keys():
        _refuse(path, f"has the keys {_listed(fields)}, not {_listed(shapes)}")
    for key, item in fields.items():
        _check(item, shapes[key], f"{path}.{key[:40]}" if path else key[:40])


def _refuse(path: str, text: str) -> NoReturn:
    raise _Refused(f"{path or 'the value'} {text}")


def _kind(value: Any) -> str:
    return _NAMES[type(value) if value is not None else None]


def _listed(keys: dict[str, Any]) -> str:
    names = ", ".join(repr(key[:40]) for key in list(keys)[:8])
    return f"{names} …" if len(keys) > 8 else names or "none"
