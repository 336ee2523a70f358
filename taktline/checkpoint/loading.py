"""Loads a checkpoint into any layout; each process reads only its own part.

::

    check     names, shapes, types, checksums; changes nothing
    begin     what torch or a user's object may refuse: optimizers, schedulers, data, random numbers
    finish    fills the tensors, and sets the rest

All ranks end each of them together. If one refuses something, all ranks raise the error, and no
weight or optimizer has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from taktline.checkpoint.files import Checkpoint, Entry
from taktline.checkpoint.model_state import ModelState, joined
from taktline.checkpoint.saving import (
    RandomNumbers,
    Training,
    is_save,
    kind_of,
    latest,
    named,
    wait,
)
from taktline.checks import check
from taktline.errors import CheckpointError
from taktline.meta import is_sharded, name_of
from taktline.runtime.host_optimizer import device_of_state
from taktline.text import counted, first_of
from taktline.transport.codec import unpack

_NO_TENSORS: dict[str, torch.Tensor] = {}
"""The tensors in options, of which there are none."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What :meth:`taktline.Pipeline.load` returns."""

    path: Path
    """The save that was loaded."""
    step: int
    """The number of training steps before the save."""
    extra: Any
    """The value that was saved as ``extra``."""


def load(model: ModelState, folder: Any, training: Training) -> Loaded:
    """Load everything that was passed; all processes call it."""
    folder, processes = check("folder", folder, Path), model.processes
    with model.together("load()") as call:
        find = partial(_find, folder, processes.place)
        path = processes.everywhere(find, f"read {folder}", call)[0]
        loading = _Loading(model, training, Path(path))
        processes.everywhere(loading.check, f"read {path}", call)
        kept = [(each, dict(vars(each))) for each in training.optimizers]
        try:
            processes.everywhere(loading.begin, f"load {path}", call)
        except BaseException:
            for optimizer, own in kept:  # the tensors of a new state are not filled yet
                vars(optimizer).update(own)
            raise
        processes.everywhere(loading.finish, f"load {path}", call)
        return loading.loaded


def restore(model: ModelState, source: Checkpoint, training: Training) -> None:
    """Load a state that is in memory, without agreement: other processes find out otherwise."""
    loading = _Loading(model, training, source)
    for part in (loading.check, loading.begin, loading.finish):
        part()


def _find(folder: Path, place: int) -> str:
    """The save to load; the first process looks for it, after saves that are being written."""
    wait(folder.parent if is_save(folder) else folder, place)
    if place:
        return ""
    found = folder if is_save(folder) else latest(folder)
    if found is None:
        state = "contains no complete one" if folder.is_dir() else "is not there"
        raise CheckpointError(f"{folder} is not a checkpoint, and {state}")
    return str(found)


class _Loading:
    """One load, as this process sees it."""

    loaded: Loaded
    _checkpoint: Checkpoint
    _targets: list[tuple[str, torch.Tensor]]
    """The tensors to fill, with their names in the checkpoint."""

    def __init__(self, model: ModelState, training: Training, source: Path | Checkpoint) -> None:
        self._model, self._training, self._source = model, training, source
        self._resumes = False

    def check(self) -> None:
        """Raise if anything does not fit."""
        source = self._source
        self._checkpoint = checkpoint = Checkpoint(source) if isinstance(source, Path) else source
        self._same = checkpoint.values.get("layout") == self._model.processes.sizes
        stored = self._stored_names()
        self._targets = self._of_model(stored)
        names = {id(value): stored[name] for name, value in self._model.saved()}
        self._optimizers = [
            _OptimizerState(optimizer, index, checkpoint, names)
            for index, optimizer in enumerate(self._training.optimizers)
        ]
        rooms = [room[:2] for optimizer in self._optimizers for room in optimizer.rooms]
        checkpoint.prepare(name for name, _ in (*self._targets, *rooms))
        for name, tensor in (*self._targets, *rooms):
            checkpoint.check(name, tensor)
        self._states = self._of_others()
        self.loaded = Loaded(checkpoint.path, checkpoint.step, checkpoint.value("extra"))

    def begin(self) -> None:
        """Load everything that may still be refused: by torch, or by a user's own object."""
        for target, state in self._states:
            target.load_state_dict(state)
        for optimizer in self._optimizers:
            self._targets += optimizer.apply()
        for scheduler in self._training.schedulers:
            _fit_groups(scheduler)
        values = self._checkpoint.values
        # In another layout, only the first process finds random numbers to go on with.
        if "layout" in values and (self._same or not self._model.processes.place):
            numbers = self._own("random")
            RandomNumbers(self._model).load_state_dict(numbers)
            self._resumes = numbers.get("reading", False)

    @torch.no_grad()
    def finish(self) -> None:
        """Fill all tensors, which were checked."""
        for name, tensor in self._targets:
            self._checkpoint.fill(name, tensor)
        self._model.resumes = self._resumes
        if self._model.schedule is not None:
            self._model.schedule.steps = self._checkpoint.step
            self._model.schedule._runner.stepped_at = 0  # gradients are of other weights now

    def _stored_names(self) -> dict[str, str]:
        """The name in the checkpoint for each tensor of the model; raises if one is missing."""
        model, path, aliases = self._model, self._checkpoint.path, self._model.first_names()
        alike = joined([self._checkpoint.aliases, aliases])
        saved: dict[str, str] = {}
        for name in self._checkpoint.tensors:
            if name.startswith("model/"):
                name = name.removeprefix("model/")
                other = saved.setdefault(alike.get(name, name), name)
                if other != name:
                    raise CheckpointError(
                        f"{other} and {name} are one weight in the model, and two in {path}"
                    )
        held = {name: alike.get(name, name) for name, _ in model.saved()}
        if missing := [name for name, first in held.items() if first not in saved]:
            raise CheckpointError(f"{path} is of another model: it lacks {first_of(missing)}")
        names = {alike.get(name, name) for name in (*model.names, *aliases, *held)}
        if foreign := [name for first, name in saved.items() if first not in names]:
            raise CheckpointError(
                f"{path} is of another model: this one does not have {first_of(foreign)}"
            )
        return {name: saved[first] for name, first in held.items()}

    def _of_model(self, stored: Mapping[str, str]) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the model that are filled, by their names in the checkpoint."""
        tensors = self._checkpoint.tensors
        targets = [(f"model/{stored[name]}", value) for name, value in self._model.saved()]
        # A tensor that no stage has may be missing in a checkpoint of another layout.
        rest = ((f"model/{name}", value) for name, value in self._model.rest.items())
        targets += [(name, value) for name, value in rest if name in tensors]
        for name, tensor in targets:
            entry = tensors[name]
            if (entry.shape, entry.dtype) != (tuple(tensor.shape), tensor.dtype):
                raise CheckpointError(
                    f"{name.removeprefix('model/')} is {name_of(tensor.dtype)}{list(tensor.shape)} "
                    f"in the model, but {name_of(entry.dtype)}{list(entry.shape)} in "
                    f"{self._checkpoint.path}; build the model as saved"
                )
        return targets

    def _of_others(self) -> list[tuple[Any, Any]]:
        """Each object with a load_state_dict() beside the optimizers, and its state."""
        given = (("data", self._training.data), ("scaler", self._training.scaler))
        states = [(one, self._own(name)) for name, one in given if one is not None]
        if schedulers := self._training.schedulers:
            saved = self._own("schedulers")
            if len(saved) != len(schedulers):
                raise CheckpointError(
                    f"{self._checkpoint.path} has the state of "
                    f"{counted(len(saved), 'scheduler')}, but you passed {len(schedulers)}"
                )
            states += zip(schedulers, saved, strict=True)
        return states

    def _own(self, name: str) -> Any:
        """The value that this process saved; in another layout, or without one, the first one's."""
        values = self._checkpoint.values
        places = sorted(int(key.rpartition("/")[2]) for key in values if key.startswith(f"{name}/"))
        if not places:
            raise CheckpointError(
                f"{self._checkpoint.path} was saved without {name.removesuffix('s')}=…, so there "
                "is none to load; leave it out"
            )
        place = self._model.processes.place
        place = place if self._same and place in places else places[0]
        return self._checkpoint.value(f"{name}/{place}")


def _fit_groups(scheduler: Any) -> None:
    """Fit a scheduler to the groups of its optimizer; the rank that saved may have had others."""
    for inner in getattr(scheduler, "_schedulers", ()):
        _fit_groups(inner)
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    for name, key in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        if len(getattr(scheduler, name, groups)) != len(groups):
            setattr(scheduler, name, [group[key] for group in groups])


class _OptimizerState:
    """The state of an optimizer in a checkpoint; raises if it does not fit, and changes nothing."""

    def __init__(
        self, optimizer: Optimizer, index: int, checkpoint: Checkpoint, names: Mapping[int, str]
    ) -> None:
        """``names`` are those of parameters in the checkpoint, by their ids."""
        self._optimizer, self._path = optimizer, checkpoint.path
        classes = [saved["class"] for saved in checkpoint.optimizers]
        if classes[index : index + 1] != [kind_of(optimizer)]:
            raise CheckpointError(
                f"{self._path} has the state of {', '.join(classes) or 'no optimizer'}, and "
                f"optimizer {index} is {kind_of(optimizer)}; use what was saved, or load without it"
            )
        saved = checkpoint.optimizers[index]
        parameters = named(optimizer, names)
        known = {name: group["options"] for group in saved["groups"] for name in group["names"]}
        self._options = [
            self._options_of([names[id(each)] for each in group["params"]], known)
            for group in optimizer.param_groups
        ]
        self._state: dict[int, dict[str, Any]] = {}
        """By the number of the parameter, as ``load_state_dict`` takes it."""
        self.rooms: list[tuple[str, torch.Tensor, nn.Parameter, str]] = []
        """Tensors to fill: the name in the checkpoint, the tensor, its parameter and its key."""
        tensors: dict[str, list[tuple[str, str, Entry]]] = {}
        for full, entry in checkpoint.tensors.items():
            if full.startswith(f"optimizer/{index}/"):
                name, _, key = full.removeprefix(f"optimizer/{index}/").rpartition("/")
                tensors.setdefault(name, []).append((key, full, entry))
        for number, (name, parameter) in enumerate(parameters):
            found = unpack(saved["state"].get(name, {}), _NO_TENSORS.__getitem__)
            for key, full, entry in tensors.get(name, ()):
                found[key] = self._room(parameter, key, full, entry)
                self.rooms.append((full, found[key], parameter, key))
            if found:
                self._state[number] = found

    def _options_of(self, names: list[str], known: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a group with these parameters: those that all of them had."""
        options = known.get(names[0]) if names else {}
        others = [name for name in names if known.get(name) != options]
        if options is None or others:
            raise CheckpointError(
                f"{' and '.join(names[:1] + others[:1])} are in one group of this optimizer, "
                f"and were in none or in two in {self._path}; use the groups that were saved"
            )
        return unpack(options, _NO_TENSORS.__getitem__)

    def _room(self, parameter: nn.Parameter, key: str, name: str, entry: Entry) -> torch.Tensor:
        """The tensor to load into: the optimizer's own, if type and shape fit, or a new one."""
        known = self._optimizer.state.get(parameter, {}).get(key)
        like = entry.dtype, entry.shape
        if isinstance(known, torch.Tensor) and (known.dtype, tuple(known.shape)) == like:
            return known
        if entry.shape == tuple(parameter.shape):
            device = device_of_state(self._optimizer, parameter)
            return torch.empty_like(
                parameter, dtype=entry.dtype, device=device, requires_grad=False
            )
        if is_sharded(parameter) and entry.shape:
            raise CheckpointError(
                f"{name} has the shape {list(entry.shape)} in {self._path}, and cannot be "
                "put in shards as the parameter is"
            )
        return torch.empty(entry.shape, dtype=entry.dtype)

    def apply(self) -> list[tuple[str, torch.Tensor]]:
        """Load the state; returns its tensors, which are to be filled, with their names."""
        optimizer, groups = self._optimizer, self._optimizer.state_dict()["param_groups"]
        for group, options in zip(groups, self._options, strict=True):
            for key, value in options.items():
                before = group.get(key)
                on_device = isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor)
                group[key] = value.to(before.device) if on_device else value
        optimizer.load_state_dict({"state": self._state, "param_groups": groups})
        # Torch copies the tensors, and casts them to the type of the parameter.
        filled: list[tuple[str, torch.Tensor]] = []
        for name, room, parameter, key in self.rooms:
            state = optimizer.state[parameter]
            state[key] = room.to(state[key].device)
            filled.append((name, state[key]))
        return filled
