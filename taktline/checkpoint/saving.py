"""Saves a model and its training, each process its own part.

::

    every process   lists its tensors, and agrees with the others which process writes which
                    writes its file and, last, its part of the manifest
    the first one   merges all parts into the manifest, and gives the folder its name

In the background a thread of each process does this. It must not use the connections that steps
use, and looks into the folder instead: the first one waits for all parts, and the others wait until
the first one has renamed the folder.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from taktline.checkpoint import folder as folders
from taktline.checkpoint.background import Snapshot, memory_of, start, wait
from taktline.checkpoint.lock import FolderLock
from taktline.checkpoint.manifest import MOST_STEPS, merged, packed, sealed
from taktline.checkpoint.model_state import Held, HeldModel, foremost
from taktline.checkpoint.optimizers import describe
from taktline.checkpoint.processes import Processes, writers
from taktline.checkpoint.random_state import random_state
from taktline.checkpoint.shards import shard_of
from taktline.checkpoint.tensor_file import aligned, require_writable, write
from taktline.checks import refuse, require_flag, require_instance, require_path, require_whole
from taktline.errors import CheckpointError, TaktlineError, text_of
from taktline.meta import name_of
from taktline.runtime.watchdog import guarded
from taktline.transport.distributed import Distributed
from taktline.transport.exchange import retold

_log = logging.getLogger("taktline")
_PAUSE = 0.02
"""Seconds between two looks into the folder."""
_FAILED = ".failed"


class Training:
    """The objects that are saved and loaded beside the model."""

    def __init__(
        self, optimizer: Any, scheduler: Any, scaler: Any, data: Any, extra: Any = None
    ) -> None:
        """Check the arguments of a user; optimizers and schedulers may be lists."""
        self.optimizers: list[Optimizer] = _listed(optimizer)
        self.schedulers = _listed(scheduler)
        self.scaler, self.data, self.extra = scaler, data, extra
        self.noted: dict[str, Any] = {}
        """The state of ``data`` and of ``random`` numbers, if it is not that of now."""
        for each in self.optimizers:
            require_instance("optimizer", each, Optimizer, "an optimizer of torch, or a list")
        others = [("scheduler", each) for each in self.schedulers]
        for name, one in (*others, ("scaler", scaler), ("data", data)):
            methods = ("state_dict", "load_state_dict")
            if one is not None and not all(callable(getattr(one, m, None)) for m in methods):
                refuse(name, "an object with state_dict() and load_state_dict()", one)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


@dataclass(slots=True)
class Saving:
    """One save, as this process sees it."""

    processes: Processes
    step: int
    keep: int | None
    file: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors that this process writes, or could write."""
    shards: list[tuple[str, int]] = field(default_factory=list)
    """What each of them is a shard of, and where; and its priority among processes."""
    trained: set[str] = field(default_factory=set)
    """The names of those tensors that optimizers change, and nothing else."""
    others: set[str] = field(default_factory=set)
    """The names of all other parameters."""
    part: dict[str, Any] = field(default_factory=dict)
    """This process's part of the manifest."""
    final: Path = Path()
    """The folder of the save, once it is complete."""
    lock: FolderLock | None = None
    """On the first process, until the save is complete or has failed."""

    @property
    def unfinished(self) -> Path:
        """The folder of the save while it is written."""
        return folders.unfinished(self.final)

    def collect(self, model: HeldModel, training: Training) -> None:
        """Note all tensors and values of this process."""
        rest = [] if self.processes.place else [Held(*each) for each in model.state.rest.items()]
        held = [
            Held(f"model/{name}", value, priority)
            for name, value, priority in foremost((*rest, *model.held)).values()
        ]
        names = model.parameter_names()
        states, own = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        optimizers = [
            describe(optimizer, names, f"optimizer/{index}", states)
            for index, optimizer in enumerate(training.optimizers)
        ]
        values = _values(model, training).items()
        self.part = {
            "files": {},
            "tensors": {},
            "aliases": model.aliases,
            "optimizers": optimizers,
            "values": {name: packed(value, name, own) for name, value in values},
        }
        held += [Held(name, value) for name, value in states.items()]
        held += [Held(f"values/{name}", value) for name, value in own.items()]
        in_bounds = {
            id(module.weight)
            for module in model.inner_modules()
            if getattr(module, "max_norm", None) is not None
        }  # the forward of such an embedding changes its weight
        for name, value, priority in held:
            self._add(name, value, priority)
            if name in states or (value.requires_grad and id(value) not in in_bounds):
                self.trained.add(name)
            elif isinstance(value, nn.Parameter):
                self.others.add(name)

    def _add(self, name: str, whole: torch.Tensor, priority: int) -> None:
        """Note the shard of a tensor in this process, if it is not empty."""
        tensor, region = shard_of(whole, name)
        require_writable(tensor, name)
        if tensor.numel() or 0 in whole.shape:
            piece = {"file": self.file, "start": region.start, "size": region.size}
            kind, shape = name_of(tensor.dtype), list(whole.shape)
            self.part["tensors"][name] = {"dtype": kind, "shape": shape, "pieces": [piece]}
            self.tensors[name] = tensor
            self.shards.append((f"{name} {region.start}", priority))

    def leave(self, writer: Mapping[str, int]) -> None:
        """Drop the tensors that other processes write."""
        for name, (shard, _) in zip(list(self.tensors), self.shards, strict=True):
            if writer[shard] != self.processes.place:
                del self.tensors[name], self.part["tensors"][name]

    def note_of(self, place: int) -> Path:
        """The file with the part of a process, which is there once all of it is written."""
        return self.unfinished / f"{place:05d}.part.json"

    def require_folder(self) -> None:
        """Raise unless this process finds the folder that the first one has made."""
        if not self.unfinished.is_dir():
            raise CheckpointError(
                f"{self.unfinished}, made by rank 0, is not here; pass the same folder on every "
                "rank, on a disk that all hosts share"
            )

    def write(self, snapshot: Snapshot | None = None) -> None:
        """Write this process's part; in the background, of a snapshot."""
        if snapshot is not None:
            snapshot.copy()  # first of all: an optimizer may wait for it
        self.require_folder()
        if self.tensors:
            tensors = aligned(self.tensors)
            written = write(self.unfinished / self.file, tensors, tensors.values())
            self.part["files"][self.file] = written
        if snapshot is not None:
            snapshot.require_unchanged()
        note = self.note_of(self.processes.place)
        folders.write_text(note, json.dumps(self.part), lasting=False)

    def finish(self) -> None:
        """Merge the parts, when all are written; on the first process."""
        if not self.processes.place:
            notes = (self.note_of(place) for place in range(self.processes.count))
            parts = [json.loads(note.read_bytes()) for note in notes]
            folders.finish(self.final, sealed(merged(parts, self.step)), self.keep)
            self.clear()

    def clear(self) -> None:
        """Remove what a save that has failed leaves, and release the folder."""
        if self.lock is not None:
            shutil.rmtree(self.unfinished, ignore_errors=True)
            self.lock.release()
            self.lock = None

    def run(self, snapshot: Snapshot) -> None:
        """Do all of it in the background, without the connections that steps use."""
        _, error = self.processes.attempt(lambda: self._run(snapshot), f"write {self.final}")
        if error is not None:
            _log.error("a background save has failed: %s", text_of(error))
            self._leave_note(error)
            self.clear()
            raise error

    def _run(self, snapshot: Snapshot) -> None:
        self.write(snapshot)
        while not self._is_over():
            for note in self.unfinished.glob(f"*{_FAILED}"):
                raise CheckpointError(note.read_text(errors="replace"))
            for transport in self.processes.transports:
                if isinstance(transport, Distributed) and transport.verdict is not None:
                    raise CheckpointError(f"the connection was lost before {self.final}")
            time.sleep(_PAUSE)
        self.finish()

    def _is_over(self) -> bool:
        """Whether the first process has the parts of all, or the others have the finished save."""
        if not self.processes.place:
            return all(self.note_of(place).exists() for place in range(self.processes.count))
        # In this order: the folder may be renamed between the two.
        there = self.unfinished.exists()
        if self.final.exists():
            return True
        if not there:
            raise CheckpointError(f"rank 0 did not save {self.final}")
        return False

    def _leave_note(self, error: TaktlineError) -> None:
        """Leave a note for the other processes; without disk space for it, they find out later."""
        try:
            (self.unfinished / self.file).unlink(missing_ok=True)
            note = self.note_of(self.processes.place).with_suffix(_FAILED)
            note.write_text(text_of(error, 4000))
        except OSError:
            pass


def _values(model: HeldModel, training: Training) -> dict[str, Any]:
    """All but the tensors of the model and optimizers; most values are each process's own."""
    place, noted = model.processes.place, training.noted
    values: dict[str, Any] = {f"random/{place}": noted.get("random") or random_state(model)}
    if training.data is not None:
        values[f"data/{place}"] = noted["data"] if "data" in noted else training.data.state_dict()
    if training.scaler is not None:
        values[f"scaler/{place}"] = training.scaler.state_dict()
    if training.schedulers:
        values[f"schedulers/{place}"] = [each.state_dict() for each in training.schedulers]
    if not place:
        values |= {"layout": model.processes.sizes, "extra": training.extra}
    return values


def _require_updated(model: HeldModel) -> None:
    """Raise if gradients wait for an optimizer: a save does not hold them."""
    if model.schedule is not None and model.schedule._runner.awaits_update():
        raise CheckpointError(
            f"the gradients of step {model.schedule.steps} wait for an optimizer, and a save does "
            "not hold them, so a resumed run would lack their update; save after optimizer.step(), "
            "or call zero_grad() before"
        )


def save(
    model: HeldModel,
    folder: Any,
    training: Training,
    *,
    keep: int | None = None,
    async_save: bool = False,
) -> Path:
    """Save everything; returns the new folder. All processes call it."""
    folder = require_path("folder", folder)
    require_flag("async_save", async_save)
    if keep is not None:
        require_whole("keep", keep, least=1)
    processes, place = model.processes, model.processes.place
    step = 0 if model.schedule is None else model.schedule.steps
    step = require_whole("steps", step, least=0, most=MOST_STEPS)
    saving = Saving(processes, step, keep, f"rank-{place:05d}.safetensors")
    home = folder.resolve()  # the program may change its folder while this is written

    def begin() -> tuple[list[tuple[str, int]], str]:
        wait(home, place)
        _require_updated(model)
        saving.collect(model, training)
        if not place:
            saving.final, saving.lock = folders.begin(home, step)
        return saving.shards, saving.final.name

    try:
        with guarded(processes.transports[0], "save()") as call:
            model.arrive(call)
            results = processes.everywhere(begin, f"save to {folder}", call)
            saving.final = home / results[0][1]
            saving.leave(writers([shards for shards, _ in results]))
            if async_save:
                memory = memory_of(home, place)
                if not memory.copies:  # only once, as training stands still meanwhile
                    processes.everywhere(saving.require_folder, f"save to {folder}", call)
                snapshot = Snapshot(saving.tensors, saving.trained, saving.others, memory)
                start(home, place, snapshot, saving.run)
            else:
                processes.everywhere(saving.write, f"write {saving.final}", call)
                processes.everywhere(saving.finish, f"write {saving.final}", call)
            return folder / saving.final.name
    except BaseException as raised:
        saving.clear()
        if isinstance(raised, TaktlineError):
            raise _reassured(raised, folder) from raised.__cause__
        raise


def _reassured(error: TaktlineError, folder: Path) -> TaktlineError:
    """The error with a note on the saves that are left."""
    try:
        earlier = folders.latest(folder)
    except CheckpointError:
        return error
    left = f"earlier saves are unchanged: {earlier}" if earlier else f"{folder} has no save"
    return retold(error, f"{text_of(error)}; {left}")
