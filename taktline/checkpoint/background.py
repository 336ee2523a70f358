"""Saves that are written beside the training: one thread a process, which talk by files.

A thread must not use the connections that steps use. So each process leaves the note of its part in
the folder, the first one waits for all of them there, and the others wait for what it makes of it.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from taktline.checkpoint.snapshot import Memory, Snapshot, watch
from taktline.errors import CheckpointError, TaktlineError, text_of
from taktline.transport.distributed import Distributed

if TYPE_CHECKING:
    from taktline.checkpoint.saving import Saving

__all__ = ["start", "wait"]

_log = logging.getLogger("taktline")
_PAUSE = 0.02
"""Seconds between two looks at the folder."""
_FAILED = ".failed"


class _Background:
    """A save that is being written."""

    def __init__(self, saving: Saving) -> None:
        self._saving = saving
        self.error: TaktlineError | None = None
        # Not a daemon: at its end, Python waits for it.
        self.thread = threading.Thread(target=self._run, name="taktline save")
        self.thread.start()

    def _run(self) -> None:
        saving = self._saving
        _, self.error = saving.together.attempt(self._write, f"write {saving.final}")
        if self.error is not None:
            _log.error("a save in the background was not made: %s", text_of(self.error))
            self._tell(self.error)
            saving.clear()

    def _write(self) -> None:
        saving = self._saving
        saving.write()
        while not self._over():
            for note in saving.unfinished.glob(f"*{_FAILED}"):
                raise CheckpointError(note.read_text(errors="replace"))
            for transport in saving.together.transports:
                if isinstance(transport, Distributed) and transport.verdict is not None:
                    raise CheckpointError(f"the ranks have lost each other before {saving.final}")
            time.sleep(_PAUSE)
        saving.finish()

    def _tell(self, error: TaktlineError) -> None:
        """Leave a note for the others; without room for it, they find out by themselves."""
        saving = self._saving
        try:
            (saving.unfinished / saving.file).unlink(missing_ok=True)
            note = saving.note_of(saving.together.place).with_suffix(_FAILED)
            note.write_text(text_of(error, 4000))
        except OSError:
            pass

    def _over(self) -> bool:
        """The first process waits for the parts of all, and the others for what becomes of them."""
        saving = self._saving
        if not saving.together.place:
            return all(saving.note_of(place).exists() for place in range(saving.together.count))
        # In this order: between the two, it may get its name.
        there = saving.unfinished.exists()
        if saving.final.exists():
            return True
        if not there:
            raise CheckpointError(f"rank 0 has given up {saving.final}")
        return False


_running: dict[tuple[Path, int], _Background] = {}
"""By the folder, and the process: local ranks share this one."""
_memory: dict[tuple[Path, int], Memory] = {}
"""Of the saves to a folder."""


def is_first_to(folder: Path, place: int) -> bool:
    """Whether nothing was saved to a folder in the background yet."""
    return (folder, place) not in _memory


def start(folder: Path, saving: Saving) -> None:
    """Copy what is to be saved to memory of the host, and write it, in the background."""
    key = folder, saving.together.place
    memory = _memory.setdefault(key, Memory())
    saving.snapshot = Snapshot(saving.tensors, saving.trained, saving.others, memory)
    _running[key] = _Background(saving)
    watch(saving.snapshot)


def wait(folder: Path, place: int = 0) -> None:
    """Wait for the save that is being written to a folder; raises what went wrong with it."""
    running = _running.pop((folder.resolve(), place), None)
    if running is not None:
        running.thread.join()
        if running.error is not None:
            raise running.error
