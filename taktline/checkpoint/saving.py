"""Saves a model and its training, each process its own part.

::

    every process   lists its tensors, and agrees with the others which process writes which
                    in the background: copies them to memory of the host, before the call returns
                    writes its file and, last, its part of the manifest
    the first one   merges all parts into the manifest, and gives the folder its name

In the background a thread of each process writes. It must not use the connections that steps use:
the first process looks into the folder until all parts are there.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from taktline.checkpoint import folder as folders
from taktline.checkpoint.manifest import MOST_STEPS, merged, packed, sealed, shard_of
from taktline.checkpoint.model_state import Held, HeldModel, Processes, foremost, writers
from taktline.checkpoint.tensor_file import require_writable, write
from taktline.checks import refuse, require_flag, require_instance, require_path, require_whole
from taktline.errors import CheckpointError, text_of
from taktline.meta import name_of
from taktline.runtime.watchdog import guarded
from taktline.sharding import is_sharded
from taktline.transport.distributed import Distributed

_log = logging.getLogger("taktline")
_PAUSE = 0.02
"""Seconds between two looks into the folder."""
_NOT_OPTIONS = ("params", "param_names")


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


class RandomNumbers:
    """The generators of a process: torch's, Python's, NumPy's, and those of ranks that share it."""

    def __init__(self, model: HeldModel) -> None:
        runner = None if model.schedule is None else model.schedule._runner
        first = model.held[0].tensor.device if model.held else torch.device("cpu")
        self._device = first if runner is None else runner.device
        self._ranks = None if runner is None else runner._random

    def state_dict(self) -> dict[str, Any]:
        """The state of all generators."""
        version, numbers, gauss = random.getstate()
        kind, keys, *rest = np.random.get_state(legacy=True)
        device, module = self._device, torch.get_device_module(self._device)
        return {
            "torch": torch.get_rng_state(),
            "device": None if device.type == "cpu" else module.get_rng_state(device),
            "python": (version, torch.tensor(numbers), gauss),
            "numpy": (kind, torch.tensor(np.asarray(keys, np.int64)), *rest),
            "ranks": None if self._ranks is None else self._ranks.states(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state of all generators; that of another kind of device stays as it is."""
        try:
            torch.set_rng_state(state["torch"])
            if self._device.type != "cpu" and state["device"] is not None:
                module = torch.get_device_module(self._device)
                module.set_rng_state(state["device"], self._device)
            version, numbers, gauss = state["python"]
            random.setstate((version, tuple(numbers.tolist()), gauss))
            kind, keys, *rest = state["numpy"]
            np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
            if self._ranks is not None and state["ranks"] is not None:
                self._ranks.set_states(state["ranks"])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"the save has random numbers that no generator takes ({error}); load an "
                "earlier one"
            ) from error


def kind_of(optimizer: Optimizer) -> str:
    """The package and the name of its class: modules move about in packages."""
    return f"{type(optimizer).__module__.partition('.')[0]}.{type(optimizer).__qualname__}"


def named(optimizer: Optimizer, names: Mapping[int, str]) -> list[tuple[str, nn.Parameter]]:
    """All parameters with their names in the model, in the order of their numbers in a state."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for parameter in parameters:
        if id(parameter) not in names:
            raise CheckpointError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that is not in "
                "this model; make it with pipe.parameters() or pipe.named_parameters()"
            )
    return [(names[id(parameter)], parameter) for parameter in parameters]


def describe(
    optimizer: Optimizer, names: Mapping[int, str], prefix: str, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """An optimizer as JSON, by the names of its parameters; its tensors go into ``tensors``.

    >>> model, tensors = nn.Linear(2, 1, bias=False), {}
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> model(torch.ones(2)).backward()
    >>> optimizer.step()
    >>> found = describe(optimizer, {id(model.weight): "weight"}, "optimizer/0", tensors)
    >>> found["class"], found["groups"][0]["names"], tensors
    ('torch.SGD', ['weight'], {'optimizer/0/weight/momentum_buffer': tensor([[1., 1.]])})
    """
    parameters, plain = named(optimizer, names), optimizer.state_dict()
    state: dict[str, dict[str, Any]] = {}
    for number, values in plain["state"].items():
        if number not in range(len(parameters)) or not isinstance(values, Mapping):
            raise CheckpointError(
                f"{kind_of(optimizer)} has state that belongs to no parameter ({number!r}), which "
                "cannot be saved by name"
            )
        name, parameter = parameters[number]
        rest = state.setdefault(name, {})
        for key, value in values.items():
            what = f"{prefix}/{name}/{key}"
            if not isinstance(value, torch.Tensor):
                rest[str(key)] = _packed(value, what)
            elif is_sharded(parameter) and not is_sharded(value) and value.numel() > 1:
                raise CheckpointError(
                    f"{what} is a plain tensor of shape {list(value.shape)} beside a parameter in "
                    "shards, so it is unknown which part of the whole it is; use an optimizer "
                    "whose state is sharded as its parameters are"
                )
            else:
                tensors[what] = value
    groups = [
        {
            "names": [parameters[number][0] for number in group["params"]],
            "options": {
                key: _packed(value, f"{prefix}.{key}")
                for key, value in group.items()
                if key not in _NOT_OPTIONS
            },
        }
        for group in plain["param_groups"]
    ]
    return {"class": kind_of(optimizer), "groups": groups, "state": state}


def _packed(value: Any, what: str) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    found = packed(value, what, tensors)
    if tensors:
        raise CheckpointError(f"{what} has tensors inside of it, which cannot be saved by name")
    return found


class Saving:
    """One save, as this process sees it."""

    def __init__(self, processes: Processes, home: Path, step: int, keep: int | None) -> None:
        """``home`` is the folder of saves."""
        self.processes, self.home, self._step, self._keep = processes, home, step, keep
        self._file = f"rank-{processes.place:05d}.safetensors"
        self._tensors: dict[str, torch.Tensor] = {}
        """The tensors that this process writes, or could write."""
        self._shards: list[tuple[str, int]] = []
        """What each of them is a shard of, and where; and its priority among processes."""
        self._part: dict[str, Any] = {}
        """This process's part of the manifest."""
        self._lock: folders.FolderLock | None = None
        """On the first process, until the save is complete or has failed."""
        self.final = Path()
        """The folder of the save, once it is complete."""

    @property
    def _unfinished(self) -> Path:
        return folders.unfinished(self.final)

    def begin(self, model: HeldModel, training: Training) -> tuple[list[tuple[str, int]], str]:
        """Note all tensors and values of this process; the first one begins the folder."""
        wait(self.home, self.processes.place)
        if model.schedule is not None and model.schedule._runner.awaits_update():
            raise CheckpointError(
                f"the gradients of step {model.schedule.steps} wait for an optimizer, and a save "
                "does not hold them, so a resumed run would lack their update; save after "
                "optimizer.step(), or call zero_grad() before"
            )
        self._collect(model, training)
        if not self.processes.place:
            self.final, self._lock = folders.begin(self.home, self._step)
        return self._shards, self.final.name

    def _collect(self, model: HeldModel, training: Training) -> None:
        rest = [] if self.processes.place else [Held(*each) for each in model.state.rest.items()]
        held = [
            Held(f"model/{name}", value, priority)
            for name, value, priority in foremost((*rest, *model.held)).values()
        ]
        names = model.parameter_names()
        states, own = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        self._part = {
            "files": {},
            "tensors": {},
            "aliases": model.aliases,
            "optimizers": [
                describe(optimizer, names, f"optimizer/{index}", states)
                for index, optimizer in enumerate(training.optimizers)
            ],
            "values": {
                name: packed(value, name, own) for name, value in _values(model, training).items()
            },
        }
        held += [Held(name, value) for name, value in states.items()]
        held += [Held(f"values/{name}", value) for name, value in own.items()]
        for name, whole, priority in held:
            tensor, region = shard_of(whole, name)
            require_writable(tensor, name)
            if tensor.numel() or 0 in whole.shape:
                piece = {"file": self._file, "start": region.start, "size": region.size}
                kind, shape = name_of(tensor.dtype), list(whole.shape)
                self._part["tensors"][name] = {"dtype": kind, "shape": shape, "pieces": [piece]}
                self._tensors[name] = tensor
                self._shards.append((f"{name} {region.start}", priority))

    def agree(self, listed: list[tuple[list[tuple[str, int]], str]]) -> None:
        """Drop the tensors that other processes write, by what all have begun."""
        self.final = self.home / listed[0][1]
        writer = writers([shards for shards, _ in listed])
        for name, (shard, _) in zip(list(self._tensors), self._shards, strict=True):
            if writer[shard] != self.processes.place:
                del self._tensors[name], self._part["tensors"][name]

    def _note_of(self, place: int) -> Path:
        """The file with the part of a process, which is there once all of it is written."""
        return self._unfinished / f"{place:05d}.part.json"

    def _require_folder(self) -> None:
        if not self._unfinished.is_dir():
            raise CheckpointError(
                f"{self._unfinished}, made by rank 0, is not here; pass the same folder on every "
                "rank, on a disk that all hosts share"
            )

    def copy(self) -> None:
        """Replace all tensors by copies in memory of the host: training may change them then."""
        self._require_folder()
        devices = {tensor.device for tensor in self._tensors.values() if tensor.is_cuda}
        for name, tensor in self._tensors.items():
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._tensors[name] = room.copy_(tensor, non_blocking=True)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def write(self) -> None:
        """Write this process's part."""
        self._require_folder()
        if self._tensors:
            self._part["files"][self._file] = write(self._unfinished / self._file, self._tensors)
        folders.write_text(self._note_of(self.processes.place), json.dumps(self._part))

    def finish(self) -> None:
        """Merge the parts, when all are written; on the first process."""
        if not self.processes.place:
            notes = map(self._note_of, range(prod(self.processes.sizes)))
            parts = [json.loads(note.read_bytes()) for note in notes]
            folders.finish(self.final, sealed(merged(parts, self._step)), self._keep)
            self.clear()

    def clear(self) -> None:
        """Remove what a save that has failed leaves, and release the folder."""
        if self._lock is not None:
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._lock.release()
            self._lock = None

    def run(self) -> None:
        """Write everything in the background, without the connections that steps use."""
        _, error = self.processes.attempt(self._run, f"write {self.final}")
        self._tensors.clear()
        if error is None:
            return
        _log.error("a background save has failed: %s", text_of(error))
        try:  # to tell the first process; without disk space for it, it finds out later
            (self._unfinished / self._file).unlink(missing_ok=True)
            note = self._note_of(self.processes.place).with_suffix(".failed")
            note.write_text(text_of(error, 4000))
        except OSError:
            pass
        self.clear()
        raise error

    def _run(self) -> None:
        self.write()
        if self.processes.place:
            return
        missing = [self._note_of(place) for place in range(prod(self.processes.sizes))]
        while missing := [note for note in missing if not note.exists()]:
            for note in self._unfinished.glob("*.failed"):
                raise CheckpointError(note.read_text(errors="replace"))
            for transport in self.processes.transports:
                if isinstance(transport, Distributed) and transport.verdict is not None:
                    raise CheckpointError(f"the connection was lost before {self.final}")
            time.sleep(_PAUSE)
        self.finish()


def _values(model: HeldModel, training: Training) -> dict[str, Any]:
    """All but the tensors of the model and optimizers; most values are each process's own."""
    place, noted = model.processes.place, training.noted
    values = {f"random/{place}": noted.get("random") or RandomNumbers(model).state_dict()}
    if training.data is not None:
        values[f"data/{place}"] = noted["data"] if "data" in noted else training.data.state_dict()
    if training.scaler is not None:
        values[f"scaler/{place}"] = training.scaler.state_dict()
    if training.schedulers:
        values[f"schedulers/{place}"] = [each.state_dict() for each in training.schedulers]
    if not place:
        values |= {"layout": model.processes.sizes, "extra": training.extra}
    return values


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
    step = 0 if model.schedule is None else model.schedule.steps
    step = require_whole("steps", step, least=0, most=MOST_STEPS)
    processes = model.processes
    # The program may change its folder while this is written.
    saving = Saving(processes, folder.resolve(), step, keep)
    try:
        with guarded(processes.transports[0], "save()") as call:
            model.arrive(call)
            begin = partial(saving.begin, model, training)
            saving.agree(processes.everywhere(begin, f"save to {folder}", call))
            what = f"write {saving.final}"
            if async_save:
                processes.everywhere(saving.copy, what, call)
                _start(saving)
            else:
                processes.everywhere(saving.write, what, call)
                processes.everywhere(saving.finish, what, call)
            return folder / saving.final.name
    except BaseException:
        saving.clear()
        raise


_running: dict[tuple[Path, int], Future[None]] = {}
"""Saves that are being written, by folder and process."""


def _start(saving: Saving) -> None:
    """Write a save in the background."""
    thread = ThreadPoolExecutor(1, "taktline save")  # at its end, Python waits for it
    _running[saving.home, saving.processes.place] = thread.submit(saving.run)
    thread.shutdown(wait=False)


def wait(folder: Path, place: int = 0) -> None:
    """Wait for the save that is being written to a folder; raises its error."""
    running = _running.pop((folder.resolve(), place), None)
    if running is not None:
        running.result()


def wait_for_all() -> None:
    """Wait until all saves are written; the next ones raise their errors."""
    for running in list(_running.values()):
        running.exception()
