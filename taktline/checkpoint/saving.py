"""Saves a model and its training, each process its own part.

::

    runs/000003-step-300/            a save: its number, and the training step
    runs/.000004-step-400.saving/    a save that is being written
    runs/.lock                       who writes it

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
import os
import random
import re
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from taktline.checkpoint.files import (
    MANIFEST,
    lock,
    merged,
    packed,
    require_writable,
    sealed,
    shard_of,
    sync,
    unlock,
    write,
    write_text,
)
from taktline.checkpoint.model_state import ModelState, Processes, first_of_each, writers
from taktline.checks import check
from taktline.errors import CheckpointError, text_of
from taktline.meta import is_sharded, name_of
from taktline.transport.distributed import Distributed

_SAVE = re.compile(r"(\d{6,})-step-\d+")
_UNFINISHED = re.compile(r"\.\d{6,}-step-\d+\.saving")
_log = logging.getLogger("taktline")


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
            check("optimizer", each, Optimizer, "an optimizer of torch, or a list")


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


class RandomNumbers:
    """The generators of a process: torch's, Python's and NumPy's."""

    def __init__(self, model: ModelState) -> None:
        runner = None if model.schedule is None else model.schedule._runner
        self._model = model
        first = next((value.device for _, value in model.held()), torch.device("cpu"))
        self._device = first if runner is None else runner.device

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
            "reading": self._model.loaders > 0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state of all generators; that of another kind of device stays as it is."""
        torch.set_rng_state(state["torch"])
        if self._device.type != "cpu" and state["device"] is not None:
            torch.get_device_module(self._device).set_rng_state(state["device"], self._device)
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers.tolist()), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))


def saves(folder: Path) -> list[Path]:
    """All complete saves of a folder, the newest first."""
    names = filter(_SAVE.fullmatch, os.listdir(folder) if folder.exists() else ())
    found = (folder / name for name in sorted(names, key=_number, reverse=True))
    return [save for save in found if (save / MANIFEST).is_file()]


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder; None if there is none.

    Only a load looks at what is in it.

    >>> import taktline as tl, tempfile, torch
    >>> pipe = tl.Pipeline(torch.nn.Linear(2, 2), microbatches=1)
    >>> runs = tempfile.mkdtemp()
    >>> print(latest(runs))
    None
    >>> pipe.save(runs) == latest(runs)
    True
    """
    return next(iter(saves(check("folder", folder, Path))), None)


def is_save(folder: Path) -> bool:
    """Whether a folder is a save, or has the name of one."""
    return (folder / MANIFEST).exists() or _SAVE.fullmatch(folder.name) is not None


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
    """An optimizer as JSON, by the names of its parameters; its tensors go into ``tensors``."""
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
                rest[str(key)] = _without_tensors(value, what)
                continue
            if is_sharded(parameter) and not is_sharded(value) and value.numel() > 1:
                raise CheckpointError(
                    f"{what} is a plain tensor of shape {list(value.shape)}, and its parameter is "
                    "in shards; use an optimizer whose state is in shards, too"
                )
            tensors[what] = value
    groups = [
        {
            "names": [parameters[number][0] for number in group["params"]],
            "options": {
                key: _without_tensors(value, f"{prefix}.{key}")
                for key, value in group.items()
                if key not in ("params", "param_names")
            },
        }
        for group in plain["param_groups"]
    ]
    return {"class": kind_of(optimizer), "groups": groups, "state": state}


def _without_tensors(value: Any, what: str) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    found = packed(value, what, tensors)
    if tensors:
        raise CheckpointError(f"{what} has tensors inside of it, which cannot be saved by name")
    return found


def described(
    model: ModelState, training: Training, values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What this process has: its part of a manifest, and the tensors to be listed there."""
    names = {id(value): name for name, value in model.saved()}
    states, own = dict[str, Any](), dict[str, Any]()
    part = {
        "files": {},
        "tensors": {},
        "aliases": model.first_names(),
        "optimizers": [
            describe(optimizer, names, f"optimizer/{index}", states)
            for index, optimizer in enumerate(training.optimizers)
        ],
        "values": {name: packed(value, name, own) for name, value in values.items()},
    }
    rest = {} if model.processes.place else model.rest
    held = first_of_each([*model.saved(), *rest.items()])
    tensors = {f"model/{name}": value for name, value in held.items()} | states
    return part, tensors | {f"values/{name}": value for name, value in own.items()}


class Saving:
    """One save, as this process sees it."""

    def __init__(self, processes: Processes, home: Path, step: int, keep: int | None) -> None:
        """``home`` is the folder of saves."""
        self.processes, self.home, self._step, self._keep = processes, home, step, keep
        self._name = ""
        """Of the folder of the save; the first process chooses it."""
        self._file = f"rank-{processes.place:05d}.safetensors"
        self._tensors: dict[str, torch.Tensor] = {}
        """The tensors that this process writes, or could write."""
        self._part: dict[str, Any] = {}
        """This process's part of the manifest."""
        self._lock: TextIO | None = None
        """On the first process, until the save is complete or has failed."""

    @property
    def final(self) -> Path:
        """The folder of the save, once it is complete."""
        return self.home / self._name

    @property
    def unfinished(self) -> Path:
        """The folder of the save until then."""
        return self.home / f".{self._name}.saving"

    def begin(self, model: ModelState, training: Training) -> tuple[list[str], str]:
        """List the tensors and values of this process; the first one begins the folder.

        Returns of each tensor what it is a shard of, and where; and the name of the save.
        """
        wait(self.home, self.processes.place)
        if model.schedule is not None and model.schedule._runner.awaits_update():
            raise CheckpointError(
                f"the gradients of step {model.schedule.steps} wait for an optimizer, and a save "
                "does not hold them, so a resumed run would lack their update; save after "
                "optimizer.step(), or call zero_grad() before"
            )
        self._part, tensors = described(model, training, _values(model, training))
        shards = [self._add(*each) for each in tensors.items()]
        if not self.processes.place:
            self._make_folder()
        return list(filter(None, shards)), self._name

    def _add(self, name: str, whole: torch.Tensor) -> str:
        """Add the shard of a tensor, unless it is empty; returns what is the same everywhere."""
        tensor, region = shard_of(whole, name)
        require_writable(tensor, name)
        if not tensor.numel() and 0 not in whole.shape:
            return ""
        start, size = [each.start for each in region], list(map(len, region))
        piece = {"file": self._file, "start": start, "size": size}
        entry = {"dtype": name_of(tensor.dtype), "shape": list(whole.shape), "pieces": [piece]}
        self._tensors[name], self._part["tensors"][name] = tensor, entry
        return f"{name} {start}"

    def _make_folder(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.home)
        for name in filter(_UNFINISHED.fullmatch, os.listdir(self.home)):  # of a killed process
            shutil.rmtree(self.home / name, ignore_errors=True)
        names = filter(_SAVE.fullmatch, os.listdir(self.home))
        number = max(map(_number, names), default=0) + 1
        self._name = f"{number:06d}-step-{self._step}"
        self.unfinished.mkdir()

    def agree(self, listed: list[tuple[list[str], str]]) -> None:
        """Drop the tensors that other processes write, by what all have begun."""
        self._name = listed[0][1]
        writer = writers([shards for shards, _ in listed])
        own, _ = listed[self.processes.place]
        for name, shard in zip(list(self._tensors), own, strict=True):
            if writer[shard] != self.processes.place:
                del self._tensors[name], self._part["tensors"][name]

    @property
    def _notes(self) -> list[Path]:
        """Of each process, the file with its part, which is there once all of it is written."""
        return [self.unfinished / f"{n:05d}.part.json" for n in range(self.processes.count)]

    def _require_folder(self) -> None:
        if not self.unfinished.is_dir():
            raise CheckpointError(
                f"{self.unfinished}, made by rank 0, is not here; pass the same folder on every "
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
            self._part["files"][self._file] = write(self.unfinished / self._file, self._tensors)
        write_text(self._notes[self.processes.place], json.dumps(self._part))

    def finish(self) -> None:
        """Merge the parts, when all are written, and name the folder; on the first process."""
        if self.processes.place:
            return
        parts = [json.loads(note.read_bytes()) for note in self._notes]
        manifest = sealed(merged(parts, self._step))
        for note in self._notes:
            note.unlink()
        write_text(self.unfinished / MANIFEST, manifest)
        sync(self.unfinished)
        self.unfinished.rename(self.final)
        sync(self.home)
        if self._keep is not None:
            _remove_old(self.home, self._keep)
        self.clear()

    def clear(self) -> None:
        """Remove what a save that has failed leaves, and unlock the folder."""
        if self._lock is not None:
            shutil.rmtree(self.unfinished, ignore_errors=True)
            unlock(self._lock)
            self._lock = None

    def run(self) -> None:
        """Write everything in the background, without the connections that steps use."""
        _, error = self.processes.attempt(self._run, f"write {self.final}")
        self._tensors.clear()
        if error is None:
            return
        _log.error("a background save has failed: %s", text_of(error))
        with suppress(OSError):  # without disk space for it, the first process finds out later
            (self.unfinished / self._file).unlink(missing_ok=True)
            failed = self._notes[self.processes.place].with_suffix(".failed")
            failed.write_text(text_of(error, 4000))
        self.clear()
        raise error

    def _run(self) -> None:
        self.write()
        missing = [] if self.processes.place else self._notes
        while missing := [note for note in missing if not note.exists()]:
            for note in self.unfinished.glob("*.failed"):
                raise CheckpointError(note.read_text(errors="replace"))
            for transport in self.processes.transports:
                if isinstance(transport, Distributed) and transport.verdict is not None:
                    raise CheckpointError(f"the connection was lost before {self.final}")
            time.sleep(0.02)
        self.finish()


def _remove_old(folder: Path, keep: int) -> None:
    """Remove all saves but the newest ones; a manifest goes first, as no part is a save."""
    for save in saves(folder)[keep:]:
        (save / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(save, ignore_errors=True)


def _values(model: ModelState, training: Training) -> dict[str, Any]:
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
    model: ModelState,
    folder: Any,
    training: Training,
    *,
    keep: int | None = None,
    async_save: bool = False,
) -> Path:
    """Save everything; returns the new folder. All processes call it."""
    folder = check("folder", folder, Path)
    check("async_save", async_save, bool)
    if keep is not None:
        check("keep", keep, int, least=1)
    step = 0 if model.schedule is None else model.schedule.steps
    processes = model.processes
    # The program may change its folder while this is written.
    saving = Saving(processes, folder.resolve(), step, keep)
    try:
        with model.together("save()") as call:
            begin = partial(saving.begin, model, training)
            saving.agree(processes.everywhere(begin, f"save to {folder}", call))
            what = f"write {saving.final}"
            if async_save:
                processes.everywhere(saving.copy, what, call)
                thread = ThreadPoolExecutor(1, "taktline save")  # at its end, Python waits for it
                _running[saving.home, processes.place] = thread.submit(saving.run)
                thread.shutdown(wait=False)
            else:
                processes.everywhere(saving.write, what, call)
                processes.everywhere(saving.finish, what, call)
            return folder / saving.final.name
    except BaseException:
        saving.clear()
        raise


_running: dict[tuple[Path, int], Future[None]] = {}
"""Saves that are being written, by folder and process."""


def wait(folder: Path, place: int = 0) -> None:
    """Wait for the save that is being written to a folder; raises its error."""
    running = _running.pop((folder.resolve(), place), None)
    if running is not None:
        running.result()


def wait_for_all() -> None:
    """Wait until all saves are written; the next ones raise their errors."""
    for running in list(_running.values()):
        running.exception()
