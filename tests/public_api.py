"""The public API as a text: names, parameters, members. ``python -m tests.public_api`` stores it.

``tests/public_api.txt`` is what users can rely on: a change of it is one for them, and has an entry
in CHANGELOG.md; see "Deprecation" in CONTRIBUTING.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from typing import Any

from tests.documents import ROOT

STORED = ROOT / "tests" / "public_api.txt"
_MODULES = [
    *("taktline", "taktline.plan", "taktline.errors", "taktline.checkpoint"),
    *("taktline.local", "taktline.split"),
]
_OF_LOCAL = ["run"]
"""What is public of a module that has no ``__all__``."""


def text() -> str:
    """A line for each name, and indented ones for the members of a class."""
    lines: list[str] = []
    for path in _MODULES:
        module = _found(path)
        lines += [f"\n{path}:" if lines else f"{path}:"]
        for name in sorted(getattr(module, "__all__", _OF_LOCAL)):
            thing = getattr(module, name)
            if not inspect.ismodule(thing):
                lines += [f"    {name}{_signature(thing)}"]
                lines += [f"        {line}" for line in _members(thing)]
    return "\n".join([*lines, ""])


def _found(path: str) -> Any:
    """A module by the name that users write, which need not be where it is."""
    parent, _, name = path.rpartition(".")
    return getattr(import_module(parent), name) if parent else import_module(path)


def _signature(thing: Any) -> str:
    """The parameters without their types, which each version of Python writes otherwise."""
    if isinstance(thing, type):
        made_by = next(
            each for each in thing.__mro__ if vars(each).keys() & {"__init__", "__new__"}
        )
        ours = made_by.__module__.startswith("taktline")
        if not ours or issubclass(thing, Enum | BaseException):
            return ""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    plain = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    return str(found.replace(parameters=plain, return_annotation=found.empty))


def _members(thing: Any) -> Iterator[str]:
    """The public methods and attributes that the package itself defines in a class."""
    if not isinstance(thing, type):
        return
    own = [each for each in thing.__mro__ if each.__module__.startswith("taktline")]
    names = {name for each in own for name in (*vars(each), *vars(each).get("__annotations__", ()))}
    for name in sorted(name for name in names if not name.startswith("_")):
        member = getattr(thing, name, None)
        yield name + (_signature(member) if inspect.isroutine(member) else "")


if __name__ == "__main__":
    STORED.write_text(text())
