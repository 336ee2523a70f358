"""A folder of saves: each save appears whole or not at all, and the oldest are removed.

::

    runs/000003-step-300/            a save: its number, and the training step
    runs/.000004-step-400.saving/    a save that is being written
    runs/.lock                       the job that writes it
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from taktline.checkpoint.lock import FolderLock
from taktline.checkpoint.manifest import MANIFEST, Checkpoint
from taktline.checks import require_path
from taktline.errors import CheckpointError

_SAVE = re.compile(r"(\d{6,})-step-\d+")
_UNFINISHED = re.compile(r"\.\d{6,}-step-\d+\.(saving|removing)")


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
    return next(filter(is_whole, saves(require_path("folder", folder))), None)


def is_whole(save: Path) -> bool:
    """Whether a save has a manifest, and all files that it names."""
    try:
        Checkpoint(save)
    except CheckpointError:
        return False
    return True


def resolve(folder: Path) -> Path:
    """The folder if it is a save, else the latest save in it."""
    if (folder / MANIFEST).exists() or _SAVE.fullmatch(folder.name):
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
    if keep is None:
        return
    whole = 0
    for save in saves(final.parent):
        if whole < keep:  # saves that are not whole do not count
            whole += is_whole(save)
        else:
            removing = save.with_name(f".{save.name}.removing")
            save.rename(removing)  # so that no part of a save looks like a save
            shutil.rmtree(removing, ignore_errors=True)


def write_text(path: Path, text: str, *, lasting: bool = True) -> None:
    """Write a file so that it appears whole or not at all; with ``lasting``, flush it to disk."""
    made = path.with_name(f"{path.name}.new")
    with open(made, "wb", buffering=0) as file:
        file.write(text.encode())
        if lasting:
            os.fsync(file.fileno())
    made.rename(path)


def sync(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
