"""Imports the package as if torch lacked private names: ``python -m tests.missing_names``.

First without any of them, then (``--each``) without those of one module of torch at a time, in
forks of a process that has torch loaded. Prints what fails.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

_LEFT_OUT = ("taktline.compat", "taktline.__main__")
"""The drop-in has names of torch itself; the other is a program."""
_LOADED = ("torch.distributed.tensor", "torch.distributed.fsdp", "taktline.render", "rich")
"""What does not look up names, loaded once for all forks."""


def import_without(gone: Collection[str]) -> str:
    """Import the package as if torch lacked these names; returns those that it has asked for."""
    asked: dict[str, None] = {}
    resolve: Callable[[str], Any] = pkgutil.resolve_name

    def look_up(name: str) -> Any:
        asked[name] = None
        if name in gone:
            raise AttributeError(name)
        return resolve(name)

    pkgutil.resolve_name = look_up
    package = importlib.import_module("taktline")
    for module in pkgutil.walk_packages(package.__path__, "taktline."):
        if not module.name.startswith(_LEFT_OUT):
            importlib.import_module(module.name)
    return " ".join(asked)


def in_fork(gone: Collection[str]) -> tuple[str, str]:
    """The names that an import without some has asked for, and its error."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = f"{import_without(gone)}\n"
        except BaseException as error:
            text = f"\n{type(error).__name__}: {error}"
        os.write(write_end, text.encode()[:60_000])
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        asked, _, error = pipe.read().decode().partition("\n")
    os.waitpid(child, 0)
    return asked, error


def failures(*, each: bool) -> Iterator[str]:
    """What fails without all names that are asked for, and without those of each module."""
    sys.dont_write_bytecode = False  # every fork would compile all modules again
    for module in _LOADED:
        importlib.import_module(module)
    asked, error = in_fork(())
    names = asked.split()
    if error or len(names) < 20:
        yield f"with all names: {error or asked}"
    owners = sorted({name.rpartition(".")[0] for name in names}) if each else []
    parts = [[name for name in names if name.rpartition(".")[0] == owner] for owner in owners]
    for gone in (names, *parts):
        if error := in_fork(gone)[1]:
            yield f"without {' '.join(gone)}: {error}"
    print(f"{len(names)} names")


if __name__ == "__main__":
    for failure in failures(each="--each" in sys.argv):
        print(failure)
