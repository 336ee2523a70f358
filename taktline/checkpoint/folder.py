"""A folder of saves: each save appears whole or not at all, and one job at a time writes there.

::

    runs/000003-step-300/            a save: its number, and the training step
    runs/.000004-step-400.saving/    a save that is being written
    runs/.lock                       who writes it
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from taktline.checkpoint.manifest import MANIFEST, Checkpoint
from taktline.checks import require_path
from taktline.errors import CheckpointError

LOCK = ".lock"
_SAVE = re.compile(r"(\d{6,})-step-\d+")
_UNFINISHED = re.compile(r"\.\d{6,}-step-\d+\.(saving|removing)")
_JOBS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF)
"""What a file system without locks says."""
_log = logging.getLogger("taktline")


def saves(folder: Path) -> list[Path]:
    """All saves of a folder, whether or not they are whole, the newest first."""
    try:
        names = filter(_SAVE.fullmatch, os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    return [folder / name for name in sorted(names, key=_number, reverse=True)]


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder; None if there is none.

    This checks manifests and the sizes of files; only a load checks every byte.

    >>> import taktline as tl, tempfile, torch
    >>> pipe = tl.Pipeline(torch.nn.Linear(2, 2), microbatches=1)
    >>> runs = tempfile.mkdtemp()
    >>> print(latest(runs))
    None
    >>> pipe.save(runs) == latest(runs)
    True
    """
    return next(filter(_is_whole, saves(require_path("folder", folder))), None)


def _is_whole(save: Path) -> bool:
    """Whether a save has a manifest, and all files that it names."""
    try:
        Checkpoint(save)
    except CheckpointError:
        return False
    return True


def is_save(folder: Path) -> bool:
    """Whether a folder is a save, or has the name of one."""
    return (folder / MANIFEST).exists() or _SAVE.fullmatch(folder.name) is not None


def resolve(folder: Path) -> Path:
    """The folder if it is a save, else the latest save in it."""
    if is_save(folder):
        return folder
    found = latest(folder)
    if found is None:
        state = "contains no complete one" if folder.is_dir() else "is not there"
        raise CheckpointError(f"{folder} is not a checkpoint, and {state}")
    return found


def begin(folder: Path, step: int) -> tuple[Path, FolderLock]:
    """Begin a new save; returns the folder that it will have, and the lock to release then."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder)
    try:
        for name in filter(_UNFINISHED.fullmatch, os.listdir(folder)):  # of a killed process
            shutil.rmtree(folder / name, ignore_errors=True)
        known = saves(folder)
        final = folder / f"{_number(known[0].name) + 1 if known else 1:06d}-step-{step}"
        unfinished(final).mkdir()
    except BaseException:
        lock.release()
        raise
    return final, lock


def unfinished(final: Path) -> Path:
    """The folder of a save while it is written."""
    return final.with_name(f".{final.name}.saving")


def finish(final: Path, manifest: str, keep: int | None) -> None:
    """Write the manifest, give the save its name, and remove the oldest saves."""
    made = unfinished(final)
    for part in made.glob("*.part.json"):
        part.unlink()
    write_text(made / MANIFEST, manifest)
    sync(made)
    made.rename(final)
    sync(final.parent)
    whole = 0
    for save in saves(final.parent) if keep is not None else ():
        if whole < (keep or 0):  # saves that are not whole do not count
            whole += _is_whole(save)
        else:
            removing = save.with_name(f".{save.name}.removing")
            save.rename(removing)  # so that no part of a save looks like a save
            shutil.rmtree(removing, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a file so that it appears whole or not at all, and flush it to disk."""
    made = path.with_name(f"{path.name}.new")
    with open(made, "wb", buffering=0) as file:
        file.write(text.encode())
        os.fsync(file.fileno())
    made.rename(path)


def sync(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class FolderLock:
    """The lock of a folder, held until ``release()``; raises if another job holds it.

    The first process of a job holds it (``flock``) while a save is written, so it ends with that
    process, whatever ends it. Its file tells who holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / LOCK, "a+")  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(self._file)
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise CheckpointError(
                    f"another job is saving to {folder}: {holder}; use a folder of its own for "
                    "each job, or end one of them"
                ) from None
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning("%s cannot be locked: %s", folder, error.strerror)
            return
        job = next((f", job {os.environ[name]}" for name in _JOBS if os.environ.get(name)), "")
        who = {"host": socket.gethostname(), "pid": os.getpid(), "job": job}
        who["since"] = time.strftime("%F %T %z")
        with suppress(OSError):  # the disk may be full
            self._file.truncate(0)
            os.write(self._file.fileno(), json.dumps(who).encode())

    def release(self) -> None:
        """Give the lock up."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # a forked process may have it open, too
            self._file.close()


def _holder(file: TextIO) -> str:
    """Who holds a lock, in words."""
    try:
        file.seek(0)
        who = json.loads(file.read(4096))
        return f"process {who['pid']} on {who['host']}{who['job']}, since {who['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has begun just now"
