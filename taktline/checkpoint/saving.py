"""Saves a model and its training, each process its own part.

::

    every process   gathers what it has, and agrees with the others on who writes what
                    writes its file and, last, the note of its part
    the first one   puts the notes together to a manifest, and gives the folder its name
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from taktline.checkpoint import folder as folders
from taktline.checkpoint.background import is_first_to, start, wait
from taktline.checkpoint.box import shard_of
from taktline.checkpoint.holding import Held, Holding, Together, foremost, writers
from taktline.checkpoint.manifest import merged, read_part, sealed
from taktline.checkpoint.optimizers import describe
from taktline.checkpoint.plain import pack
from taktline.checkpoint.randomness import random_state
from taktline.checkpoint.snapshot import Snapshot
from taktline.checkpoint.tensor_file import require_writable, write
from taktline.checks import refuse, require_flag, require_instance, require_path, require_whole
from taktline.errors import CheckpointError, TaktlineError, restore, text_of
from taktline.meta import name_of
from taktline.runtime.watchdog import guarded

__all__ = ["Training", "save"]


@dataclass(slots=True)
class Training:
    """What is saved and loaded beside the model."""

    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[Any] = ()
    scaler: Any = None
    data: Any = None
    extra: Any = None

    @classmethod
    def of(cls, optimizer: Any, scheduler: Any, scaler: Any, data: Any, extra: Any = None):
        """What a user has passed: optimizers and schedulers may be several, in a list."""
        optimizers, schedulers = _listed(optimizer), _listed(scheduler)
        for each in optimizers:
            require_instance("optimizer", each, Optimizer, "an optimizer of torch, or a list")
        others = [("scheduler", each) for each in schedulers]
        for name, one in (*others, ("scaler", scaler), ("data", data)):
            methods = ("state_dict", "load_state_dict")
            if one is not None and not all(callable(getattr(one, m, None)) for m in methods):
                refuse(name, "an object with state_dict() and load_state_dict()", one)
        return cls(optimizers, schedulers, scaler, data, extra)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


@dataclass(slots=True)
class Saving:
    """One save, as this process sees it."""

    together: Together
    step: int
    keep: int | None
    file: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """What this process writes."""
    trained: set[str] = field(default_factory=set)
    """Those of the tensors that optimizers change, and nobody else."""
    others: set[str] = field(default_factory=set)
    """All other parameters."""
    snapshot: Snapshot | None = None
    """What copies the tensors, in the background."""
    part: dict[str, Any] = field(default_factory=dict)
    """Of the manifest."""
    unfinished: Path = Path()
    final: Path = Path()

    def call(self, folder: Path, name: str) -> None:
        """Set where it is written, and what it is called then."""
        self.unfinished, self.final = folders.unfinished(folder, name), folder / name

    def collect(self, holding: Holding, training: Training) -> list[tuple[str, int]]:
        """Note all that is here; returns what of it others may have, and its priority."""
        tensors = [] if self.together.place else [Held(*each) for each in holding.optional.items()]
        tensors = [
            Held(f"model/{name}", value, priority)
            for name, value, priority in foremost((*tensors, *holding.held)).values()
        ]
        names, states = holding.parameter_names(), dict[str, torch.Tensor]()
        told = [
            describe(optimizer, names, f"optimizer/{index}", states)
            for index, optimizer in enumerate(training.optimizers)
        ]
        tensors += [Held(name, value) for name, value in states.items()]
        own: dict[str, torch.Tensor] = {}
        values = _values(holding, training).items()
        self.part = {
            "files": {},
            "tensors": {},
            "aliases": dict(holding.aliases),
            "optimizers": told,
            "values": {name: pack(value, name, own) for name, value in values},
        }
        shards: list[tuple[str, int]] = []
        in_bounds = {
            id(module.weight)
            for part in holding.modules
            for module in part.modules()
            if getattr(module, "max_norm", None) is not None
        }  # an embedding's forward sees to that
        for name, value, priority in tensors:
            if (key := self._add(name, value)) is None:
                continue
            shards.append((key, priority))
            if name in states or (value.requires_grad and id(value) not in in_bounds):
                self.trained.add(name)
            elif isinstance(value, nn.Parameter):
                self.others.add(name)
        for name, value in own.items():
            self._add(f"values/{name}", value)
        return shards

    def _add(self, name: str, whole: torch.Tensor) -> str | None:
        """Note a tensor; returns a text for what is here of it, if there is anything."""
        tensor, box = shard_of(whole, name)
        require_writable(tensor, name)
        if not tensor.numel() and 0 not in whole.shape:
            return None
        piece = {"file": self.file, "start": box.start, "size": box.size}
        kind, shape = name_of(tensor.dtype), list(whole.shape)
        self.part["tensors"][name] = {"dtype": kind, "shape": shape, "pieces": [piece]}
        self.tensors[name] = tensor
        return f"{name} {box.start}"

    def leave(self, writer: dict[str, int]) -> None:
        """Leave to others what they write."""
        for name in list(self.tensors):
            start = self.part["tensors"][name]["pieces"][0]["start"]
            if writer.get(f"{name} {start}", self.together.place) != self.together.place:
                del self.tensors[name], self.part["tensors"][name]

    def note_of(self, place: int) -> Path:
        """Where a process notes its part, once it is written."""
        return self.unfinished / f"{place:05d}.part.json"

    def require_folder(self) -> None:
        """Raise unless this process finds the folder that the first one has made."""
        if not self.unfinished.is_dir():
            raise CheckpointError(
                f"{self.unfinished} is not there, which rank 0 has made; pass the same folder on "
                "every rank, on a disk that all hosts share"
            )

    def write(self) -> None:
        """Write this process's part."""
        if self.snapshot is not None:  # whatever comes then, an optimizer may wait for it
            self.snapshot.copy()
        self.require_folder()
        if self.tensors:
            self.part["files"][self.file] = write(self.unfinished / self.file, self.tensors)
        if self.snapshot is not None:
            self.snapshot.require_unchanged()
        note = self.note_of(self.together.place)
        folders.write_text(note, json.dumps(self.part), lasting=False)

    def finish(self) -> None:
        """Put the parts together, when all are written; on the first process."""
        if not self.together.place:
            parts = [read_part(self.note_of(place)) for place in range(self.together.count)]
            manifest = sealed(merged(parts, self.step))
            folders.finish(self.unfinished, self.final, manifest, self.keep)

    def clear(self) -> None:
        """Remove what was written of a save that is not made; on the first process."""
        if not self.together.place and self.unfinished.name:
            shutil.rmtree(self.unfinished, ignore_errors=True)


def _values(holding: Holding, training: Training) -> dict[str, Any]:
    """What is no tensor of the model or an optimizer: most of it is each process's own."""
    place, schedule = holding.together.place, holding.schedule
    ranks = None if schedule is None else schedule._runner._random
    values: dict[str, Any] = {f"random/{place}": random_state(holding.device, ranks)}
    if training.data is not None:
        values[f"data/{place}"] = training.data.state_dict()
    if training.scaler is not None:
        values[f"scaler/{place}"] = training.scaler.state_dict()
    if training.schedulers:
        states = [each.state_dict() for each in training.schedulers]
        values[f"schedulers/{place}"] = states
    if not place:
        values |= {"layout": holding.together.sizes, "extra": training.extra}
    return values


def save(
    holding: Holding,
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
    together, place = holding.together, holding.together.place
    step = 0 if holding.schedule is None else holding.schedule.steps
    saving = Saving(together, step, keep, f"rank-{place:05d}.safetensors")
    home = folder.resolve()  # the training may go elsewhere while it is written

    def begin() -> tuple[list[tuple[str, int]], str]:
        wait(home, place)
        shards = saving.collect(holding, training)
        if not place:
            saving.call(home, folders.begin(home, step))
        return shards, saving.final.name

    try:
        with guarded(together.transports[0], "save()") as call:
            holding.arrive(call)
            told = together.everywhere(begin, f"save to {folder}", call)
            saving.call(home, told[0][1])
            saving.leave(writers([shards for shards, _ in told]))
            if async_save:
                if is_first_to(home, place):  # later it would cost time that training stands still
                    together.everywhere(saving.require_folder, f"save to {folder}", call)
                start(home, saving)
            else:
                together.everywhere(saving.write, f"write {saving.final}", call)
                together.everywhere(saving.finish, f"write {saving.final}", call)
            return folder / saving.final.name
    except TaktlineError as raised:
        saving.clear()
        raise _reassured(raised, folder) from raised.__cause__


def _reassured(error: TaktlineError, folder: Path) -> TaktlineError:
    """An error that says what is left."""
    try:
        earlier = folders.latest(folder)
    except CheckpointError:
        return error
    left = f"what was saved before is as it was: {earlier}" if earlier else f"{folder} has no save"
    return restore(type(error), (f"{text_of(error)}; {left}",), vars(error))
