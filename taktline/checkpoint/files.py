"""Opens files of a checkpoint; refuses pipes, sockets and devices, which may block for ever."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from taktline.errors import CheckpointError

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path) -> BufferedReader:
    """Open a regular file to read it; raises for anything else, without waiting.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp(), "manifest.json")
    >>> os.mkfifo(path)
    >>> open_file(path)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    taktline.errors.CheckpointError: .../manifest.json is a pipe, not a regular file
    """
    require_regular(path, os.stat(path).st_mode)  # to open a device may have an effect
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        require_regular(path, os.fstat(handle).st_mode)
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def require_regular(path: Path, mode: int) -> None:
    """Raise unless the mode of a path is that of a regular file."""
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise CheckpointError(f"{path} is {kind}, not a regular file")
