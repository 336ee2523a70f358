"""The shape that JSON from outside must have, written as the types that it is made of.

::

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

from typing import Any, cast

from taktline.checks.json_text import loads
from taktline.errors import JsonError

__all__ = ["Either", "conform", "read"]

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
    if fault := _fault(value, shape, ""):
        raise JsonError(what, fault)
    return value


def _fault(value: Any, shape: Any, path: str) -> str:
    """What is wrong with a value, in words; empty if nothing is."""
    if isinstance(shape, Either):
        faults = [_fault(value, each, path) for each in shape.shapes]
        return "" if "" in faults else f"{_place(path)} is {_kind(value)}, which does not fit here"
    if isinstance(shape, (list, tuple)):
        return _fault_of_list(value, cast(Any, shape), path)
    if isinstance(shape, dict):
        return _fault_of_object(value, cast(Any, shape), path)
    if shape is object:
        return ""
    if shape is int and type(value) is int and not -(2**63) <= value < 2**63:
        return f"{_place(path)} has more than 64 bits"
    types = (int, float) if shape is float else (shape,)
    fits = type(value) in types or value is shape is None
    return "" if fits else f"{_place(path)} is {_kind(value)}, not {_NAMES[shape]}"


def _fault_of_list(value: Any, shape: list[Any] | tuple[Any, ...], path: str) -> str:
    if not isinstance(value, list):
        return f"{_place(path)} is {_kind(value)}, not a list"
    items = cast("list[Any]", value)
    if isinstance(shape, tuple) and len(items) != len(shape):
        return f"{_place(path)} has {len(items)} entries, not {len(shape)}"
    shapes = shape if isinstance(shape, tuple) else shape * len(items)
    for index, (item, inner) in enumerate(zip(items, shapes, strict=True)):
        if fault := _fault(item, inner, f"{path}[{index}]"):
            return fault
    return ""


def _fault_of_object(value: Any, shape: dict[Any, Any], path: str) -> str:
    if not isinstance(value, dict):
        return f"{_place(path)} is {_kind(value)}, not an object"
    fields = cast("dict[str, Any]", value)
    shapes = dict.fromkeys(fields, shape[str]) if str in shape else shape
    if fields.keys() != shapes.keys():
        return f"{_place(path)} has the keys {_listed(fields)}, not {_listed(shapes)}"
    for key, item in fields.items():
        if fault := _fault(item, shapes[key], f"{path}.{key[:40]}" if path else key[:40]):
            return fault
    return ""


def _place(path: str) -> str:
    return path or "the value"


def _kind(value: Any) -> str:
    return _NAMES[type(value) if value is not None else None]


def _listed(keys: dict[str, Any]) -> str:
    names = ", ".join(repr(key[:40]) for key in list(keys)[:8])
    return f"{names} …" if len(keys) > 8 else names or "none"
