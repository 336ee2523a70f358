"""A folder of saves: each appears in it whole or not at all, and the oldest ones go.

::

    runs/000003-step-300/            a save: its number, and the training step
    runs/.000004-step-400.saving/    one that is being written, under another name
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from taktline.checkpoint.manifest import MANIFEST, Manifest
from taktline.checks import require_path
from taktline.errors import CheckpointError

__all__ = [
    "begin",
    "finish",
    "is_whole",
    "latest",
    "resolve",
    "saves",
    "sync",
    "unfinished",
    "write_text",
]

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
    """The newest save in a folder that is whole; None if there is none.

    It looks at manifests and at the sizes of files. That every byte is as it was written, a load
    finds out.

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
        Manifest.read(save)
    except CheckpointError:
        return False
    return True


def resolve(folder: Path) -> Path:
    """The save that a folder is, or the latest one in it."""
    if (folder / MANIFEST).exists() or _SAVE.fullmatch(folder.name):
        return folder
    found = latest(folder)
    if found is None:
        state = "has none in it that is whole" if folder.is_dir() else "is not there"
        raise CheckpointError(f"{folder} is no checkpoint, and {state}")
    return found


def begin(folder: Path, step: int) -> str:
    """Make room for a save; returns what it is going to be called."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in filter(_UNFINISHED.fullmatch, os.listdir(folder)):  # of a process that was killed
        shutil.rmtree(folder / name, ignore_errors=True)
    known = saves(folder)
    name = f"{_number(known[0].name) + 1 if known else 1:06d}-step-{step}"
    unfinished(folder, name).mkdir()
    return name


def unfinished(folder: Path, name: str) -> Path:
    """Where a save is while it is written."""
    return folder / f".{name}.saving"


def finish(made: Path, final: Path, manifest: str, keep: int | None) -> None:
    """Write the manifest, give the save its name, and let go of the oldest ones."""
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
        if whole < keep:  # those that are not whole do not count
            whole += is_whole(save)
        else:
            removing = save.with_name(f".{save.name}.removing")
            save.rename(removing)  # so that it is never half there
            shutil.rmtree(removing, ignore_errors=True)


def write_text(path: Path, text: str, *, lasting: bool = True) -> None:
    """Write a file so that it is there whole or not at all; see it onto the disk if it lasts."""
    made = path.with_name(f"{path.name}.new")
    with open(made, "wb", buffering=0) as file:
        file.write(text.encode())
        if lasting:
            os.fsync(file.fileno())
    made.rename(path)


def sync(folder: Path) -> None:
    """See the names in a folder onto the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
