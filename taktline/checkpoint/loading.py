"""Loads a checkpoint into any layout; each process reads only its own part.

::

    check     names, shapes, types, checksums; changes nothing
    begin     what torch or a user's object may refuse: optimizers, schedulers, data, random
              numbers; can be undone
    finish    fills the tensors, and sets the rest

All ranks end each of them together. If one refuses something, all ranks raise the error, and
nothing has changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from taktline.checkpoint.folder import is_save, resolve
from taktline.checkpoint.manifest import Checkpoint, Entry, unpacked
from taktline.checkpoint.model_state import HeldModel, joined
from taktline.checkpoint.saving import RandomNumbers, Training, kind_of, named, wait
from taktline.checks import require_path
from taktline.errors import CheckpointError
from taktline.meta import name_of
from taktline.runtime.watchdog import guarded
from taktline.sharding import is_sharded
from taktline.text import counted, first_of

_NO_TENSORS: dict[str, torch.Tensor] = {}
"""The tensors inside of options and other values, which are never saved."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What :meth:`taktline.Pipeline.load` returns."""

    path: Path
    """The save that was loaded."""
    step: int
    """The number of training steps before the save."""
    extra: Any
    """The value that was saved as ``extra``."""


def load(model: HeldModel, folder: Any, training: Training) -> Loaded:
    """Load everything that was passed; all processes call it."""
    folder, processes = require_path("folder", folder), model.processes
    with guarded(processes.transports[0], "load()") as call:
        model.arrive(call)
        path = processes.everywhere(
            partial(_find, folder, processes.place), f"read {folder}", call
        )[0]
        loading = _Loading(model, Path(path), training)
        processes.everywhere(loading.check, f"read {path}", call)
        try:
            processes.everywhere(loading.begin, f"load {path}", call)
        except BaseException:
            loading.undo()
            raise
        processes.everywhere(loading.finish, f"load {path}", call)
        return loading.loaded


def _find(folder: Path, place: int) -> str:
    """The save to load; the first process looks for it, after saves that are being written."""
    wait(folder.parent if is_save(folder) else folder, place)
    return "" if place else str(resolve(folder))


class _Loading:
    """One load, as this process sees it."""

    def __init__(self, model: HeldModel, path: Path, training: Training) -> None:
        self._model, self.path, self._training = model, path, training
        self._undo: list[Callable[[], None]] = []

    def check(self) -> None:
        """Raise if anything does not fit."""
        self._checkpoint = checkpoint = Checkpoint(self.path)
        stored = self._stored_names()
        self._targets = self._of_model(stored)
        names = {key: stored[name] for key, name in self._model.parameter_names().items()}
        self._optimizers = [
            _OptimizerState(optimizer, index, checkpoint, names)
            for index, optimizer in enumerate(self._training.optimizers)
        ]
        for targets in (self._targets, *(each.targets for each in self._optimizers)):
            for name, tensor in targets:
                checkpoint.check(name, tensor)
        self._same = checkpoint.values.get("layout") == self._model.processes.sizes
        self._states = self._of_others()
        self.loaded = Loaded(self.path, checkpoint.step, checkpoint.value("extra"))

    def begin(self) -> None:
        """Load everything that may still be refused: by torch, or by a user's own object."""
        generators = RandomNumbers(self._model)
        self._undo.append(_kept(generators))  # and so the last to be undone
        for target, state in self._states:
            self._undo.append(_kept(target))
            target.load_state_dict(state)
        for optimizer in self._optimizers:
            self._undo.append(optimizer.kept())
            self._targets += optimizer.apply()
        for scheduler in self._training.schedulers:
            _fit_groups(scheduler)
        # In another layout, only the first process finds random numbers to go on with.
        if self._same or not self._model.processes.place:
            generators.load_state_dict(self._own("random", "random numbers"))

    def undo(self) -> None:
        """Undo ``begin()``."""
        while self._undo:
            with suppress(Exception):
                self._undo.pop()()

    @torch.no_grad()
    def finish(self) -> None:
        """Fill all tensors, which were checked."""
        for name, tensor in self._targets:
            self._checkpoint.fill(name, tensor)
        if self._model.schedule is not None:
            self._model.schedule.steps = self._checkpoint.step
            self._model.schedule._runner.stepped_at = 0  # gradients are of other weights now

    def _stored_names(self) -> dict[str, str]:
        """The name in the checkpoint for each tensor of the model; raises if one is missing."""
        model, path = self._model, self.path
        alike = joined([self._checkpoint.aliases, model.aliases])
        saved: dict[str, str] = {}
        for name in self._checkpoint.tensors:
            if name.startswith("model/"):
                name = name.removeprefix("model/")
                other = saved.setdefault(alike.get(name, name), name)
                if other != name:
                    raise CheckpointError(
                        f"{other} and {name} are one weight in the model, and two in {path}"
                    )
        held = {each.name: alike.get(each.name, each.name) for each in model.held}
        if missing := [name for name, first in held.items() if first not in saved]:
            raise CheckpointError(f"{path} is of another model: it lacks {first_of(missing)}")
        names = {alike.get(name, name) for name in (*model.state.names, *model.aliases, *held)}
        if foreign := [name for first, name in saved.items() if first not in names]:
            raise CheckpointError(
                f"{path} is of another model: this one does not have {first_of(foreign)}"
            )
        return {name: saved[first] for name, first in held.items()}

    def _of_model(self, stored: Mapping[str, str]) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the model that are filled, by their names in the checkpoint."""
        tensors = self._checkpoint.tensors
        targets = [(f"model/{stored[held.name]}", held.tensor) for held in self._model.held]
        # A tensor that no stage has may be missing in a checkpoint of another layout.
        rest = ((f"model/{name}", value) for name, value in self._model.state.rest.items())
        targets += [(name, value) for name, value in rest if name in tensors]
        for name, tensor in targets:
            entry = tensors[name]
            if (entry.shape, entry.dtype) != (tuple(tensor.shape), tensor.dtype):
                raise CheckpointError(
                    f"{name.removeprefix('model/')} is {name_of(tensor.dtype)}{list(tensor.shape)} "
                    f"in the model, but {name_of(entry.dtype)}{list(entry.shape)} in {self.path}; "
                    "build the model as saved"
                )
        return targets

    def _of_others(self) -> list[tuple[Any, Any]]:
        """Each object with a load_state_dict() beside the optimizers, and its state."""
        training = self._training
        states = [
            (one, self._own(name, f"{name}=…"))
            for name, one in (("data", training.data), ("scaler", training.scaler))
            if one is not None
        ]
        if training.schedulers:
            saved = self._own("schedulers", "scheduler=…")
            if len(saved) != len(training.schedulers):
                raise CheckpointError(
                    f"{self.path} has the state of {counted(len(saved), 'scheduler')}, but you "
                    f"passed {len(training.schedulers)}"
                )
            states += zip(training.schedulers, saved, strict=True)
        return states

    def _own(self, name: str, what: str) -> Any:
        """The value that this process saved; in another layout, or without one, the first one's."""
        values = self._checkpoint.values
        places = sorted(int(key.rpartition("/")[2]) for key in values if key.startswith(f"{name}/"))
        if not places:
            raise CheckpointError(
                f"{self.path} was saved without {what}, so there is none to load; leave it out"
            )
        place = self._model.processes.place
        place = place if self._same and place in places else places[0]
        return self._checkpoint.value(f"{name}/{place}")


def _kept(target: Any) -> Callable[[], None]:
    """A function that gives an object the state back that it has now."""
    state, own = copy.deepcopy(target.state_dict()), dict(getattr(target, "__dict__", {}))

    def undo() -> None:
        if own:
            vars(target).clear()
            vars(target).update(own)
        target.load_state_dict(state)

    return undo


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
        count = len(checkpoint.optimizers)
        if index >= count:
            raise CheckpointError(
                f"{self._path} has the state of {counted(count, 'optimizer')}, so there is none "
                f"for optimizer {index}; leave it out, or load another save"
            )
        saved = checkpoint.optimizers[index]
        if saved["class"] != kind_of(optimizer):
            raise CheckpointError(
                f"{self._path} has the state of {saved['class']}, and this optimizer is "
                f"{kind_of(optimizer)}; use the one that was saved, or load without it"
            )
        self._named = named(optimizer, names)
        self._options = [
            self._options_of([names[id(each)] for each in group["params"]], saved["groups"])
            for group in optimizer.param_groups
        ]
        rest = saved["state"]
        self._state = {
            number: unpacked(rest[name], _NO_TENSORS.__getitem__)
            for number, (name, _) in enumerate(self._named)
            if rest.get(name)
        }
        self.targets: list[tuple[str, torch.Tensor]] = []
        """Tensors to fill, with their names in the checkpoint."""
        self._places: list[tuple[int, str]] = []
        """The number of the parameter of each of them, and its key there."""
        prefix = f"optimizer/{index}/"
        numbers: dict[str, list[int]] = {}
        for number, (name, _) in enumerate(self._named):
            numbers.setdefault(name, []).append(number)
        for full, entry in checkpoint.tensors.items():
            name, _, key = full.removeprefix(prefix).rpartition("/")
            for number in numbers.get(name, ()) if full.startswith(prefix) else ():
                room = self._room(self._named[number][1], key, full, entry)
                self._state.setdefault(number, {})[key] = room
                self.targets.append((full, room))
                self._places.append((number, key))

    def _options_of(self, names: list[str], groups: Any) -> dict[str, Any]:
        """The options of a group with these parameters: those that all of them had."""
        group_of = {name: number for number, group in enumerate(groups) for name in group["names"]}
        found: dict[int, str] = {}
        for name in names:
            if name not in group_of:
                raise CheckpointError(
                    f"{self._path} has no state of the optimizer for {name}; pass the "
                    "optimizer the parameters that it was saved with"
                )
            found.setdefault(group_of[name], name)
        if len(found) > 1:
            first, second = list(found.values())[:2]
            raise CheckpointError(
                f"{first} and {second} are in one group of this optimizer, and were in two "
                f"with other options in {self._path}; use the groups that were saved"
            )
        options = groups[next(iter(found))]["options"] if found else {}
        return unpacked(options, _NO_TENSORS.__getitem__)

    def _room(self, parameter: nn.Parameter, key: str, name: str, entry: Entry) -> torch.Tensor:
        """The tensor to load into: the optimizer's own, if type and shape fit, or a new one."""
        known = self._optimizer.state.get(parameter, {}).get(key)
        like = entry.dtype, entry.shape
        if isinstance(known, torch.Tensor) and (known.dtype, tuple(known.shape)) == like:
            return known
        if entry.shape == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=entry.dtype, requires_grad=False)
        if is_sharded(parameter) and entry.shape:
            raise CheckpointError(
                f"{name} has the shape {list(entry.shape)} in {self._path}, and cannot be "
                "put in shards as the parameter is"
            )
        return torch.empty(entry.shape, dtype=entry.dtype)

    def kept(self) -> Callable[[], None]:
        """A function that gives the optimizer the state back that it has now."""
        own = self._optimizer.__dict__
        return partial(own.update, dict(own))  # a load replaces state and groups

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
        for (name, room), (number, key) in zip(self.targets, self._places, strict=True):
            state = optimizer.state[self._named[number][1]]
            state[key] = room.to(state[key].device)
            filled.append((name, state[key]))
        return filled
