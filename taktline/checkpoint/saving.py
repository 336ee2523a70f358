"""Saves a model and its training, each process its own part.

::

    every process   gathers what it has, and agrees with the others on who writes what
                    writes its file and, last, its part of the manifest
    the first one   puts the parts together, and gives the folder its name
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from taktline.checkpoint import folder as folders
from taktline.checkpoint.background import start, wait
from taktline.checkpoint.box import shard_of
from taktline.checkpoint.holding import Holding, Together
from taktline.checkpoint.manifest import Part, merged
from taktline.checkpoint.optimizers import describe
from taktline.checkpoint.plain import pack
from taktline.checkpoint.randomness import random_state
from taktline.checkpoint.tensor_file import require_writable, write
from taktline.checks import refuse, require_flag, require_instance, require_path, require_whole
from taktline.errors import TaktlineError, restore, text_of
from taktline.meta import name_of
from taktline.runtime.watchdog import guarded

__all__ = ["Training", "save"]

_CALL = "save()"


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
        optimizers = _listed(optimizer)
        for each in optimizers:
            require_instance("optimizer", each, Optimizer, "an optimizer of torch, or a list")
        schedulers = _listed(scheduler)
        for name, one in (
            *(("scheduler", s) for s in schedulers),
            ("scaler", scaler),
            ("data", data),
        ):
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
    part: Part
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """What this process writes."""
    unfinished: Path = Path()
    final: Path = Path()

    @property
    def place(self) -> int:
        """The number of this process."""
        return self.together.place

    def write(self) -> TaktlineError | None:
        """Write this process's part; returns what went wrong."""
        path = self.unfinished / self.part.file
        return self.together.attempt(lambda: self._write(path), f"write {path}")

    def _write(self, path: Path) -> None:
        if self.tensors:
            checksums = write(path, self.tensors)
            self.part.bytes = path.stat().st_size
            for name, text in checksums.items():
                self.part.tensors[name]["pieces"][0]["crc32"] = text
        folders.write_text(self.part_of(self.place), self.part.to_text())

    def part_of(self, place: int) -> Path:
        """Where a process notes what it has written."""
        return self.unfinished / f"{place:05d}.part.json"

    def finish(self) -> TaktlineError | None:
        """Put the parts together; on the first process, when all are written."""
        return self.together.attempt(self._finish, f"write {self.final}")

    def _finish(self) -> None:
        parts = [Part.read(self.part_of(place)) for place in range(self.together.count)]
        folders.finish(self.unfinished, self.final, merged(parts, self.step), self.keep)

    def clear(self) -> None:
        """Remove what was written of a save that is not made; on the first process."""
        if not self.place and self.unfinished.name:
            shutil.rmtree(self.unfinished, ignore_errors=True)

    def stage(self, buffers: dict[str, torch.Tensor]) -> None:
        """Copy what is to be written to memory of the host; ``buffers`` are used again."""
        for name, tensor in self.tensors.items():
            room = buffers.get(name)
            if room is None or (room.dtype, room.shape) != (tensor.dtype, tensor.shape):
                room = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
                )
            buffers[name] = self.tensors[name] = room.copy_(tensor, non_blocking=True)
        if any(tensor.is_pinned() for tensor in self.tensors.values()):
            torch.cuda.synchronize()


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
    together, earlier, saving = holding.together, None, None
    try:
        with guarded(together.transports[0], _CALL) as what:
            holding.arrive(what)
            error, saving, mine = _begun(holding, folder, training, keep)
            told = together.gather(mine, what)
            earlier = told[0]["earlier"]
            if any(each["failed"] for each in told):
                together.agree(error)
            saving.unfinished, saving.final = (Path(path) for path in told[0]["paths"])
            _share_out(saving, [each["shards"] for each in told])
            if async_save:
                start(folder, saving)
                return saving.final
            together.agree(saving.write())
            together.agree(None if saving.place else saving.finish())
            return saving.final
    except TaktlineError as raised:
        if saving is not None:
            saving.clear()
        raise _reassured(raised, folder, earlier) from raised.__cause__


def _begun(
    holding: Holding, folder: Path, training: Training, keep: int | None
) -> tuple[TaktlineError | None, Saving, dict[str, Any]]:
    """What this process would save, and what the others have to know of it."""
    together = holding.together
    place = together.place
    part = Part(f"rank-{place:05d}.safetensors", aliases=dict(holding.aliases))
    saving = Saving(together, holding.get_step(), keep, part)
    shards: list[Any] = []
    told: dict[str, Any] = {"failed": False, "shards": shards, "paths": [], "earlier": ""}

    def begin() -> None:
        if not place:
            told["earlier"] = str(folders.latest(folder) or "")
        wait(folder)
        _collect(saving, holding, training, shards)
        if not place:
            saving.unfinished, saving.final = folders.begin(folder, saving.step)
            told["paths"] = [str(saving.unfinished), str(saving.final)]

    error = together.attempt(begin, f"save to {folder}")
    told["failed"] = error is not None
    return error, saving, told


def _collect(saving: Saving, holding: Holding, training: Training, shards: list[Any]) -> None:
    """Fill in what there is: tensors, and all else packed."""
    holding.settle()
    tensors: dict[str, tuple[torch.Tensor, int]] = {}
    for name, value in holding.optional.items() if not saving.place else ():
        tensors[f"model/{name}"] = value, 0
    for name, value, counts in holding.held:
        known = tensors.get(f"model/{name}")
        if known is None or known[1] < counts:
            tensors[f"model/{name}"] = value, counts
    names = holding.parameter_names()
    for index, optimizer in enumerate(training.optimizers):
        states: dict[str, torch.Tensor] = {}
        told = describe(optimizer, names, f"optimizer/{index}", states)
        saving.part.optimizers.append(told)
        tensors |= {name: (value, 0) for name, value in states.items()}
    for name, (value, counts) in tensors.items():
        shard = shard_of(value, name)
        require_writable(shard.tensor, name)
        if shard.tensor.numel() or 0 in shard.shape:
            _add(saving, name, shard.tensor, shard.shape, shard.box.start)
            shards.append([name, *shard.box, counts])
    _collect_values(saving, holding, training)


def _collect_values(saving: Saving, holding: Holding, training: Training) -> None:
    """What is no tensor of the model or an optimizer: some of it is each process's own."""
    place, tensors, values = saving.place, {}, saving.part.values
    own = {"random": random_state(holding.device, holding.random)}
    if training.data is not None:
        own["data"] = training.data.state_dict()
    shared: dict[str, Any] = {}
    if not place:
        shared["layout"] = holding.together.sizes
        shared["extra"] = training.extra
        shared["schedulers"] = [each.state_dict() for each in training.schedulers]
        if training.scaler is not None:
            shared["scaler"] = training.scaler.state_dict()
    for name, value in (*((f"{key}/{place}", each) for key, each in own.items()), *shared.items()):
        values[name] = pack(value, name, tensors)
    for name, value in tensors.items():
        _add(saving, f"values/{name}", value, tuple(value.shape), (0,) * value.dim())


def _add(
    saving: Saving, name: str, tensor: torch.Tensor, shape: Sequence[int], start: Sequence[int]
) -> None:
    piece = {
        "file": saving.part.file,
        "start": list(start),
        "size": list(tensor.shape),
        "crc32": "",
    }
    saving.tensors[name] = tensor
    saving.part.tensors[name] = {
        "dtype": name_of(tensor.dtype),
        "shape": list(shape),
        "pieces": [piece],
    }


def _share_out(saving: Saving, shards: list[list[Any]]) -> None:
    """Leave to others what they have, too, and count for more, or come first."""
    best: dict[str, tuple[int, int]] = {}
    for place, process in enumerate(shards):
        for name, begin, size, counts in process:
            key = f"{name} {begin} {size}"
            if key not in best or best[key][0] < counts:
                best[key] = counts, place
    for name, begin, size, _ in shards[saving.place]:
        if best[f"{name} {begin} {size}"][1] != saving.place:
            del saving.tensors[name], saving.part.tensors[name]


def _reassured(error: TaktlineError, folder: Path, earlier: str | None) -> TaktlineError:
    """An error that says what is left, if this process knows."""
    if earlier is None:
        return error
    left = f"what was saved before is as it was: {earlier}" if earlier else f"{folder} has no save"
    return restore(type(error), (f"{text_of(error)}; {left}",), vars(error))
