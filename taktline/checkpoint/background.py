"""Saves that are written in the background, by one thread in each process.

These threads must not use the connections that steps use. So they exchange files: each process
writes its part of the manifest into the folder. The first one waits for all parts, and the others
wait until the first one has renamed the folder.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch.optim.optimizer import register_optimizer_step_pre_hook

from taktline.checkpoint.snapshot import Memory, Snapshot
from taktline.errors import CheckpointError, TaktlineError, text_of
from taktline.transport.distributed import Distributed

if TYPE_CHECKING:
    from taktline.checkpoint.saving import Saving

_log = logging.getLogger("taktline")
_PAUSE = 0.02
"""Seconds between two looks into the folder."""
_FAILED = ".failed"


class _Running(NamedTuple):
    """A save that is being written; its tensors are copied first."""

    snapshot: Snapshot
    written: Future[None]


_running: dict[tuple[Path, int], _Running] = {}
"""By folder and process."""
_memory: dict[tuple[Path, int], Memory] = {}
"""By folder and process."""


def is_first_to(folder: Path, place: int) -> bool:
    """Whether nothing was saved to a folder in the background yet."""
    return (folder, place) not in _memory


def start(folder: Path, saving: Saving) -> None:
    """Copy all tensors to memory of the host, and write them, in the background."""
    _watch_optimizers()
    key = folder, saving.processes.place
    memory = _memory.setdefault(key, Memory())
    snapshot = Snapshot(saving.tensors, saving.trained, saving.others, memory)
    thread = ThreadPoolExecutor(1, "taktline save")  # at its end, Python waits for it
    _running[key] = _Running(snapshot, thread.submit(_run, saving, snapshot))
    thread.shutdown(wait=False)


def wait(folder: Path, place: int = 0) -> None:
    """Wait for the save that is being written to a folder; raises its error."""
    key = folder.resolve(), place
    if key in _running:
        try:
            _running[key].written.result()
        finally:
            del _running[key]


def settle(*_: object) -> None:
    """Wait until all tensors that are being saved are copied."""
    for running in list(_running.values()):
        running.snapshot.settle()


@cache
def _watch_optimizers() -> None:
    # For all optimizers: one that is not saved may change a parameter, too.
    register_optimizer_step_pre_hook(settle)


def _run(saving: Saving, snapshot: Snapshot) -> None:
    _, error = saving.processes.attempt(lambda: _write(saving, snapshot), f"write {saving.final}")
    if error is not None:
        _log.error("a background save has failed: %s", text_of(error))
        _leave_note(saving, error)
        saving.clear()
        raise error


def _write(saving: Saving, snapshot: Snapshot) -> None:
    snapshot.copy()  # first of all: an optimizer may wait for it
    saving.write_tensors()
    snapshot.require_unchanged()
    saving.write_part()
    while not _is_over(saving):
        for note in saving.unfinished.glob(f"*{_FAILED}"):
            raise CheckpointError(note.read_text(errors="replace"))
        for transport in saving.processes.transports:
            if isinstance(transport, Distributed) and transport.verdict is not None:
                raise CheckpointError(f"the connection was lost before {saving.final}")
        time.sleep(_PAUSE)
    saving.finish()


def _is_over(saving: Saving) -> bool:
    """Whether the first process has the parts of all, or the others have the finished save."""
    if not saving.processes.place:
        return all(saving.note_of(place).exists() for place in range(saving.processes.count))
    # In this order: the folder may be renamed between the two.
    there = saving.unfinished.exists()
    if saving.final.exists():
        return True
    if not there:
        raise CheckpointError(f"rank 0 did not save {saving.final}")
    return False


def _leave_note(saving: Saving, error: TaktlineError) -> None:
    """Leave a note for the other processes; without disk space for it, they find out later."""
    try:
        (saving.unfinished / saving.file).unlink(missing_ok=True)
        note = saving.note_of(saving.processes.place).with_suffix(_FAILED)
        note.write_text(text_of(error, 4000))
    except OSError:
        pass
