"""Loads a checkpoint into any layout; each process reads only its own part.

Names, shapes, types and checksums are checked on every rank before anything is changed. If a check
fails on one rank, all ranks raise the error, and nothing has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from taktline.checkpoint.background import wait
from taktline.checkpoint.folder import resolve
from taktline.checkpoint.manifest import Manifest, unpacked
from taktline.checkpoint.model_state import HeldModel
from taktline.checkpoint.optimizers import OptimizerState
from taktline.checkpoint.random_state import set_random_state
from taktline.checkpoint.saving import Training
from taktline.checkpoint.shards import Region, shard_of
from taktline.checkpoint.snapshot import settle
from taktline.checkpoint.tensor_file import TensorFile
from taktline.checks import require_path
from taktline.errors import CheckpointError
from taktline.meta import name_of
from taktline.runtime.watchdog import guarded
from taktline.text import counted, first_of


@dataclass(frozen=True, slots=True)
class Loaded:
    """What :meth:`taktline.Pipeline.load` returns."""

    path: Path
    """The save that was loaded."""
    step: int
    """The number of training steps before the save."""
    extra: Any
    """The value that was saved as ``extra``."""


class _Source:
    """The tensors of a checkpoint."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._files: dict[str, TensorFile] = {}

    def _pieces(self, name: str, region: Region) -> Iterator[tuple[TensorFile, Region, Region]]:
        """The pieces of a tensor that meet a region: file, piece, and what both have in common."""
        for file, piece in self.manifest.tensors[name].pieces:
            common = piece.meets(region)
            if common is not None:
                if file not in self._files:
                    checksums = self.manifest.files[file]["crc32"]
                    self._files[file] = TensorFile(self.manifest.path / file, checksums)
                yield self._files[file], piece, common

    def check(self, name: str, like: torch.Tensor) -> None:
        """Raise unless all bytes for a tensor are there, and as they were written."""
        _, region = shard_of(like, name)
        covered = 0
        for file, piece, common in self._pieces(name, region):
            stored = file.tensors.get(name)
            expected = self.manifest.tensors[name].dtype, piece.size
            if stored is None or (stored.dtype, stored.shape) != expected:
                raise CheckpointError(f"{file.path} does not have {name} as the manifest says")
            file.check(name, common.inside(piece))
            covered += prod(common.size)
        if covered != prod(region.size):
            raise CheckpointError(f"{self.manifest.path} lacks a part of {name}")

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Fill a tensor that has been checked."""
        tensor, region = shard_of(tensor, name)
        for file, piece, common in self._pieces(name, region):
            tensor[common.inside(region)].copy_(file.view(name)[common.inside(piece)])
            file.release(name)

    def read(self, name: str) -> torch.Tensor:
        """A tensor that belongs neither to the model nor to an optimizer."""
        entry = self.manifest.tensors.get(f"values/{name}")
        if entry is None:
            raise CheckpointError(f"{self.manifest.path} lacks values/{name}")
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.check(f"values/{name}", tensor)
        self.fill(f"values/{name}", tensor)
        return tensor


def load(model: HeldModel, folder: Any, training: Training) -> Loaded:
    """Load everything that was passed; all processes call it."""
    folder = require_path("folder", folder)
    processes = model.processes

    def find() -> str:
        settle()
        wait(folder, processes.place)
        return "" if processes.place else str(resolve(folder))

    with guarded(processes.transports[0], "load()") as call:
        model.arrive(call)
        path = processes.everywhere(find, f"read {folder}", call)[0]
        loading = _Loading(model, Path(path), training)
        processes.everywhere(loading.check, f"read {path}", call)
        processes.everywhere(loading.apply, f"load {path}", call)
        return loading.loaded


class _Loading:
    """One load, as this process sees it."""

    def __init__(self, model: HeldModel, path: Path, training: Training) -> None:
        self._model, self.path, self._training = model, path, training
        self._synonyms: dict[str, list[str]] = {}
        for alias, name in model.aliases.items():
            self._synonyms.setdefault(name, [name]).append(alias)

    def check(self) -> None:
        """Raise if anything does not fit."""
        self._manifest = Manifest.read(self.path)
        self._source = _Source(self._manifest)
        self._targets = self._of_model()
        names = self._model.parameter_names()
        self._optimizers = [
            OptimizerState(optimizer, index, self._manifest, names, self._stored)
            for index, optimizer in enumerate(self._training.optimizers)
        ]
        for optimizer in self._optimizers:
            self._targets += optimizer.targets
        for name, tensor in self._targets:
            self._source.check(name, tensor)
        self._states = self._of_others()

    @torch.no_grad()
    def apply(self) -> None:
        """Load everything."""
        for target, state in self._states:
            target.load_state_dict(state)
        for name, tensor in self._targets:
            self._source.fill(name, tensor)
        for optimizer in self._optimizers:
            optimizer.apply()
        for scheduler in self._training.schedulers:
            _fit_groups(scheduler)
        schedule = self._model.schedule
        if schedule is not None:
            schedule.steps = self._manifest.step
        if self._random is not None:
            ranks = None if schedule is None else schedule._runner._random
            set_random_state(self._random, self._model.device, ranks)

    def _stored(self, name: str) -> str:
        """The name in the checkpoint for a tensor of the model."""
        aliases = self._manifest.aliases
        known = (
            found
            for each in (name, *self._synonyms.get(name, ()))
            for found in (each, aliases.get(each, each))
        )
        return next((each for each in known if f"model/{each}" in self._manifest.tensors), name)

    def _of_model(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the model that are filled, by their names in the checkpoint."""
        model, tensors, path = self._model, self._manifest.tensors, self.path
        found = {held.name: self._stored(held.name) for held in model.held}
        missing = [name for name, stored in found.items() if f"model/{stored}" not in tensors]
        if missing:
            raise CheckpointError(f"{path} is of another model: it lacks {first_of(missing)}")
        names = {*model.names, *model.aliases, *model.optional, *found.values()}
        stored = (name.removeprefix("model/") for name in tensors if name.startswith("model/"))
        foreign = [name for name in stored if name not in names]
        if foreign:
            raise CheckpointError(
                f"{path} is of another model: this one does not have {first_of(foreign)}"
            )
        for others in self._synonyms.values():
            apart = [name for name in others if f"model/{name}" in tensors]
            if len(apart) > 1:
                raise CheckpointError(
                    f"{' and '.join(apart)} are one weight in the model, and {len(apart)} in {path}"
                )
        targets = [(f"model/{found[held.name]}", held.tensor) for held in model.held]
        # A tensor that no stage has may be missing in a checkpoint of another layout.
        rest = ((f"model/{name}", value) for name, value in model.optional.items())
        targets += [(name, value) for name, value in rest if name in tensors]
        for name, tensor in targets:
            entry = tensors[name]
            if (entry.shape, entry.dtype) != (tuple(tensor.shape), tensor.dtype):
                raise CheckpointError(
                    f"{name.removeprefix('model/')} is {name_of(tensor.dtype)}{list(tensor.shape)} "
                    f"in the model, but {name_of(entry.dtype)}{list(entry.shape)} in {path}; build "
                    "the model as saved"
                )
        return targets

    def _of_others(self) -> list[tuple[Any, Any]]:
        """Each object with a load_state_dict(), and its state; the other values are kept here."""
        training, values = self._training, self._manifest.values
        processes = self._model.processes
        same = values.get("layout") == processes.sizes
        states: list[tuple[Any, Any]] = []
        for name, one in (("data", training.data), ("scaler", training.scaler)):
            if one is not None:
                states.append((one, self._own(name, same, f"{name}=…")))
        if training.schedulers:
            saved = self._own("schedulers", same, "scheduler=…")
            if len(saved) != len(training.schedulers):
                raise CheckpointError(
                    f"{self.path} has the state of {counted(len(saved), 'scheduler')}, but you "
                    f"passed {len(training.schedulers)}"
                )
            states += zip(training.schedulers, saved, strict=True)
        # In another layout, only the first process finds random numbers to go on with.
        goes_on = same or not processes.place
        self._random = self._own("random", same, "random numbers") if goes_on else None
        extra = unpacked(values.get("extra"), self._source.read)
        self.loaded = Loaded(self.path, self._manifest.step, extra)
        return states

    def _own(self, name: str, same: bool, what: str) -> Any:
        """The value that this process saved; in another layout, or without one, the first one's."""
        values = self._manifest.values
        places = sorted(int(key.rpartition("/")[2]) for key in values if key.startswith(f"{name}/"))
        if not places:
            raise CheckpointError(
                f"{self.path} was saved without {what}, so there is none to load; leave it out"
            )
        place = self._model.processes.place
        place = place if same and place in places else places[0]
        return unpacked(values[f"{name}/{place}"], self._source.read)


def _fit_groups(scheduler: Any) -> None:
    """Fit a scheduler to the groups of its optimizer; the rank that saved may have had others."""
    for inner in getattr(scheduler, "_schedulers", ()):
        _fit_groups(inner)
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    for name, key in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        if len(getattr(scheduler, name, groups)) != len(groups):
            setattr(scheduler, name, [group[key] for group in groups])
