"""Reads JSON from outside strictly: no double keys, no deep nesting, no endless numbers."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn, cast

from taktline.errors import JsonError

__all__ = ["MAX_DEPTH", "MAX_DIGITS", "loads"]

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
    reader = _Reader(what)
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=reader.no_key_twice,
            parse_int=reader.whole_number,
            parse_float=reader.fraction,
            parse_constant=reader.fail_at_constant,
        )
        # Encoding fails at a half of a surrogate pair, written as it is or as an escape.
        text.encode("utf-8")
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise JsonError(
            what, f"not JSON: {error.msg}", row=error.lineno, column=error.colno
        ) from None
    except UnicodeDecodeError as error:
        raise JsonError(what, f"is not a text in UTF-8 (byte {error.start})") from None
    except UnicodeEncodeError:
        raise JsonError(what, "holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        value = None
        reader.fail_at_depth()
    if not _within_depth(value):
        reader.fail_at_depth()
    return value


class _Reader:
    """What Python's reader asks for each part of a text."""

    def __init__(self, what: str) -> None:
        self._what = what

    def no_key_twice(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            seen: set[str] = set()
            # The set takes each key in, and answers None.
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            self._fail(f"has the key {json.dumps(twice[:60])} twice in one object")
        return fields

    def whole_number(self, digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            self._fail(f"holds a number of {len(digits)} digits; at most {MAX_DIGITS} are read")
        return int(digits)

    def fraction(self, digits: str) -> float:
        number = float(digits)
        if math.isinf(number):
            self._fail(f"holds the number {digits[:60]}, which is too large")
        return number

    def fail_at_constant(self, name: str) -> NoReturn:
        self._fail(f"holds {name}, which is not JSON")

    def fail_at_depth(self) -> NoReturn:
        self._fail(f"is nested deeper than {MAX_DEPTH} levels")

    def _fail(self, reason: str) -> NoReturn:
        raise JsonError(self._what, reason)


def _within_depth(value: Any) -> bool:
    """Whether no more than so many lists and objects lie in each other: level by level."""
    level: list[list[Any]] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        level = [
            _parts(cast(Any, part))
            for whole in level
            for part in whole
            if isinstance(part, (list, dict))
        ]
        if not level:
            return True
    return False


def _parts(whole: list[Any] | dict[str, Any]) -> list[Any]:
    return list(whole.values()) if isinstance(whole, dict) else whole
