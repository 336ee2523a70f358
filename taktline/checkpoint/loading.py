"""Loads a checkpoint into whatever there is now: each process reads what it needs, and no more.

Everything is looked at before anything is changed: names, shapes, types and checksums, on every
rank. What does not fit on one of them is raised on all, and all are as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taktline.checkpoint.background import wait
from taktline.checkpoint.box import shard_of
from taktline.checkpoint.folder import resolve
from taktline.checkpoint.holding import Holding
from taktline.checkpoint.manifest import Manifest
from taktline.checkpoint.optimizers import OptimizerState
from taktline.checkpoint.plain import unpack
from taktline.checkpoint.randomness import set_random_state
from taktline.checkpoint.saving import Training
from taktline.checkpoint.tensor_file import TensorFile, blocks
from taktline.checks import require_path
from taktline.errors import CheckpointError
from taktline.meta import name_of
from taktline.runtime.watchdog import guarded
from taktline.text import counted

__all__ = ["Loaded", "load"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded, beside what it was loaded into."""

    path: Path
    """The save."""
    step: int
    """The number of training steps before it."""
    extra: Any
    """What was saved as ``extra``."""


class Source:
    """The tensors of a checkpoint."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._files: dict[str, TensorFile] = {}

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self.manifest.path / name)
        return self._files[name]

    def check(self, name: str, like: torch.Tensor) -> None:
        """Raise unless what is needed for a tensor is there, and as it was written."""
        entry, shard = self.manifest.tensors[name], shard_of(like, name)
        covered = 0
        for piece in entry.pieces:
            common = piece.box.meets(shard.box)
            if common is None:
                continue
            file = self._file(piece.file)
            stored = file.tensors.get(name)
            if stored is None or (stored.dtype, stored.shape) != (entry.dtype, piece.box.size):
                raise CheckpointError(f"{file.path} does not have {name} as the manifest says")
            wanted = blocks(stored.shape, common.inside(piece.box), entry.dtype.itemsize)
            if len(piece.checksums) != 8 * len(wanted):
                raise CheckpointError(f"{self.manifest.path}: {name} lacks checksums")
            file.check(name, piece.checksums, wanted)
            covered += torch.Size(common.size).numel()
        if covered != torch.Size(shard.box.size).numel():
            raise CheckpointError(f"{self.manifest.path} lacks a part of {name}")

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Give a tensor its values; it has been checked."""
        shard = shard_of(tensor, name)
        for piece in self.manifest.tensors[name].pieces:
            common = piece.box.meets(shard.box)
            if common is not None:
                file = self._file(piece.file)
                values = file.view(name)[common.inside(piece.box)]
                shard.tensor[common.inside(shard.box)].copy_(values)
                file.release(name)

    def read(self, name: str) -> torch.Tensor:
        """A tensor that is no part of the model."""
        entry = self.manifest.tensors.get(f"values/{name}")
        if entry is None:
            raise CheckpointError(f"{self.manifest.path} lacks values/{name}")
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.check(f"values/{name}", tensor)
        self.fill(f"values/{name}", tensor)
        return tensor


def load(holding: Holding, folder: Any, training: Training) -> Loaded:
    """Load everything that was passed; all processes call it."""
    folder = require_path("folder", folder)
    together = holding.together
    with guarded(together.transports[0], "load()") as what:
        holding.arrive(what)
        found: list[str] = []

        def find() -> None:
            wait(folder)
            found.append("" if together.place else str(resolve(folder)))

        error = together.attempt(find, f"read {folder}")
        told = together.gather(found, what)
        if not all(told):
            together.agree(error)
        loading = _Loading(holding, Path(told[0][0]), training)
        together.agree(together.attempt(loading.check, f"read {loading.path}"))
        together.agree(together.attempt(loading.apply, f"load {loading.path}"))
        return loading.loaded


class _Loading:
    """One load, as this process sees it."""

    def __init__(self, holding: Holding, path: Path, training: Training) -> None:
        self._holding, self.path, self._training = holding, path, training

    @torch.no_grad()
    def check(self) -> None:
        """Raise if anything does not fit."""
        self._holding.settle()
        self._manifest = Manifest.read(self.path)
        self._source = Source(self._manifest)
        self._check_model()
        training, names = self._training, self._holding.parameter_names()
        self._optimizers = [
            OptimizerState(optimizer, index, self._manifest, names, self._stored)
            for index, optimizer in enumerate(training.optimizers)
        ]
        for optimizer in self._optimizers:
            for name, like in optimizer.wanted():
                self._source.check(name, like)
        self._states = self._unpacked()

    @torch.no_grad()
    def apply(self) -> None:
        """Load it all."""
        for target, state in self._states:
            target.load_state_dict(state)
        for name, tensor in self._targets():
            self._source.fill(name, tensor)
        for optimizer in self._optimizers:
            optimizer.apply(self._source.fill)
        self._holding.set_step(self._manifest.step)
        if self._random is not None:
            set_random_state(self._random, self._holding.device, self._holding.random)

    def _stored(self, name: str) -> str:
        """What the checkpoint calls something of the model."""
        tensors, aliases = self._manifest.tensors, self._manifest.aliases
        others = [other for other in self._synonyms.get(name, ()) if other != name]
        for each in (name, *others):
            for known in (each, aliases.get(each, each)):
                if f"model/{known}" in tensors:
                    return known
        return name

    def _targets(self) -> Iterable[tuple[str, torch.Tensor]]:
        """What is filled, by its name in the checkpoint; what no stage has, if it is there."""
        for held in self._holding.held:
            yield f"model/{self._stored(held.name)}", held.tensor
        for name, value in self._holding.optional.items():
            if f"model/{name}" in self._manifest.tensors:
                yield f"model/{name}", value

    def _check_model(self) -> None:
        holding, tensors, path = self._holding, self._manifest.tensors, self.path
        self._synonyms: dict[str, list[str]] = {}
        for alias, name in holding.aliases.items():
            self._synonyms.setdefault(name, []).append(alias)
        found = {held.name: self._stored(held.name) for held in holding.held}
        missing = [name for name, stored in found.items() if f"model/{stored}" not in tensors]
        if missing:
            raise CheckpointError(f"{path} is of another model: it lacks {_told(missing)}")
        names = {*holding.names, *holding.aliases, *holding.optional, *found.values()}
        stored = (n.removeprefix("model/") for n in tensors if n.startswith("model/"))
        foreign = [name for name in stored if name not in names]
        if foreign:
            raise CheckpointError(
                f"{path} is of another model: this one does not have {_told(foreign)}"
            )
        for name, others in self._synonyms.items():
            apart = [n for n in (name, *others) if f"model/{n}" in tensors]
            if len(apart) > 1:
                raise CheckpointError(
                    f"{' and '.join(apart)} are one weight in the model, and {len(apart)} in {path}"
                )
        for name, tensor in self._targets():
            entry = tensors[name]
            if (entry.shape, entry.dtype) != (tuple(tensor.shape), tensor.dtype):
                raise CheckpointError(
                    f"{name.removeprefix('model/')} is {name_of(tensor.dtype)}"
                    f"{list(tensor.shape)} in the model, but {name_of(entry.dtype)}"
                    f"{list(entry.shape)} in {path}; make the model as it was saved"
                )
            self._source.check(name, tensor)

    def _unpacked(self) -> list[tuple[Any, Any]]:
        """What has a load_state_dict() of its own, and what it is to load; the rest is kept."""
        training, values, place = (
            self._training,
            self._manifest.values,
            self._holding.together.place,
        )
        same = values.get("layout") == self._holding.together.sizes
        own = str(place) if same else "0"
        states: list[tuple[Any, Any]] = []
        if training.data is not None:
            states.append((training.data, self._value(f"data/{own}", "data=…")))
        if training.scaler is not None:
            states.append((training.scaler, self._value("scaler", "scaler=…")))
        if training.schedulers:
            saved = self._value("schedulers", "scheduler=…")
            if len(saved) != len(training.schedulers):
                raise CheckpointError(
                    f"{self.path} has the state of {counted(len(saved), 'scheduler')}, and here "
                    f"there are {len(training.schedulers)}"
                )
            states += zip(training.schedulers, saved, strict=True)
        # In another layout there is nothing that a generator could go on with, but for the first.
        keeps = not same and place
        self._random = None if keeps else self._value(f"random/{own}", "random numbers")
        self.loaded = Loaded(self.path, self._manifest.step, self._value("extra", "extra"))
        return states

    def _value(self, name: str, what: str) -> Any:
        if name not in self._manifest.values:
            raise CheckpointError(
                f"{self.path} was saved without {what}, so there is none to load; leave it out"
            )
        return unpack(self._manifest.values[name], self._source.read)


def _told(names: Sequence[str]) -> str:
    return names[0] + (f" and {counted(len(names) - 1, 'other')}" if len(names) > 1 else "")
