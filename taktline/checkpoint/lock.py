"""The lock of a folder of saves: one job at a time writes there.

The first process of a job holds it while a save is written. The lock (``flock``) belongs to that
process, so it ends with it, whatever ends it. Its file tells who holds it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from taktline.checkpoint.files import open_file
from taktline.errors import CheckpointError

NAME = ".lock"
_JOBS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
_UNKNOWN = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF)
"""What a file system without such locks says."""
_log = logging.getLogger("taktline")


class FolderLock:
    """The lock of a folder, held until ``release()``; raises if another job holds it."""

    def __init__(self, folder: Path) -> None:
        self._path, self._handle = folder / NAME, -1
        while self._handle < 0:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                raise CheckpointError(
                    f"another job is saving to {folder}: {_holder(self._path)}; use a folder of "
                    "its own for each job, or end one of them"
                ) from None
            except OSError as error:
                os.close(handle)
                if error.errno not in _UNKNOWN:
                    raise
                _log.warning("%s cannot be locked: %s", folder, error.strerror)
                return
            if _is_at(handle, self._path):
                self._handle = handle
                self._sign()
            else:
                os.close(handle)  # the one who held it has just removed the file

    def _sign(self) -> None:
        """Write who holds the lock."""
        job = next((f", job {os.environ[name]}" for name in _JOBS if os.environ.get(name)), "")
        who = {"host": socket.gethostname(), "pid": os.getpid(), "job": job}
        os.ftruncate(self._handle, 0)
        os.write(self._handle, json.dumps(who | {"since": time.strftime("%F %T %z")}).encode())

    def release(self) -> None:
        """Give the lock up."""
        if self._handle >= 0:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._handle)
            self._handle = -1


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    """Who holds a lock, in words."""
    try:
        with open_file(path) as file:
            who = json.loads(file.read(4096))
        return f"process {who['pid']} on {who['host']}{who['job']}, since {who['since']}"
    except (OSError, ValueError, KeyError, TypeError, CheckpointError):
        return "a process that has begun just now"
