"""Loads a checkpoint into any layout; each process reads only its own part.

::

    check     names, shapes, types, checksums, random numbers; changes nothing
    begin     what torch or a user's object may refuse: optimizers, schedulers, data; can be undone
    finish    fills the tensors, and sets the rest

All ranks end each of them together. If one refuses something, all ranks raise the error, and
nothing has changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taktline.checkpoint.background import settle, wait
from taktline.checkpoint.folder import resolve
from taktline.checkpoint.manifest import Checkpoint
from taktline.checkpoint.model_state import HeldModel, joined
from taktline.checkpoint.optimizers import OptimizerState
from taktline.checkpoint.random_state import RandomState
from taktline.checkpoint.saving import Training
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
        try:
            processes.everywhere(loading.begin, f"load {path}", call)
        except BaseException:
            loading.undo()
            raise
        processes.everywhere(loading.finish, f"load {path}", call)
        return loading.loaded


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
            OptimizerState(optimizer, index, checkpoint, names)
            for index, optimizer in enumerate(self._training.optimizers)
        ]
        for name, tensor in self._targets:
            checkpoint.check(name, tensor)
        for optimizer in self._optimizers:
            for name, tensor in optimizer.targets:
                checkpoint.check(name, tensor)
        place, sizes = self._model.processes.place, self._model.processes.sizes
        self._same = checkpoint.values.get("layout") == sizes
        self._states = self._of_others()
        # In another layout, only the first process finds random numbers to go on with.
        goes_on = self._same or not place
        self._random = self._random_state() if goes_on else None
        self.loaded = Loaded(self.path, checkpoint.step, checkpoint.value("extra"))

    def begin(self) -> None:
        """Load everything that may still be refused: by torch, or by a user's own object."""
        for target, state in self._states:
            self._undo.append(_kept(target))
            target.load_state_dict(state)
        for optimizer in self._optimizers:
            self._undo.append(optimizer.kept())
            self._targets += optimizer.apply()
        for scheduler in self._training.schedulers:
            _fit_groups(scheduler)

    def undo(self) -> None:
        """Undo ``begin()``."""
        while self._undo:
            with suppress(Exception):
                self._undo.pop()()

    @torch.no_grad()
    def finish(self) -> None:
        """Fill all tensors, and load the rest, which was checked."""
        for name, tensor in self._targets:
            self._checkpoint.fill(name, tensor)
        if self._model.schedule is not None:
            self._model.schedule.steps = self._checkpoint.step
            self._model.schedule._runner.stepped_at = 0  # gradients are of other weights now
        if self._random is not None:
            self._random.apply()

    def _stored_names(self) -> dict[str, str]:
        """The name in the checkpoint for each tensor of the model; raises if one is missing."""
        model, path = self._model, self.path
        tensors = self._checkpoint.tensors
        saved = [name.removeprefix("model/") for name in tensors if name.startswith("model/")]
        alike = joined([self._checkpoint.aliases, model.aliases])
        known = {alike.get(name, name): name for name in saved} | {name: name for name in saved}
        stored = {
            name: known.get(name, known.get(alike.get(name, name), ""))
            for name in (held.name for held in model.held)
        }
        missing = [name for name, found in stored.items() if not found]
        if missing:
            raise CheckpointError(f"{path} is of another model: it lacks {first_of(missing)}")
        names = {alike.get(name, name) for name in (*model.state.names, *model.aliases, *stored)}
        foreign = [name for name in saved if alike.get(name, name) not in names]
        if foreign:
            raise CheckpointError(
                f"{path} is of another model: this one does not have {first_of(foreign)}"
            )
        weights: dict[str, list[str]] = {}
        for name in saved:
            weights.setdefault(model.aliases.get(name, name), []).append(name)
        for apart in weights.values():
            if len(apart) > 1:
                raise CheckpointError(
                    f"{' and '.join(apart)} are one weight in the model, and {len(apart)} in {path}"
                )
        return stored

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

    def _random_state(self) -> RandomState:
        """The state of random numbers, which generators can take."""
        state = self._own("random", "random numbers")
        try:
            return RandomState(state, self._model)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.path} has random numbers that no generator takes ({error}); load an "
                "earlier save"
            ) from error

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
