"""Models in the layout of Hugging Face: safetensors in several files, with an index."""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.checkpoint.files import open_file
from taktline.checkpoint.folder import sync, write_text
from taktline.checkpoint.model_state import HeldModel, foremost
from taktline.checkpoint.processes import writers
from taktline.checkpoint.tensor_file import TensorFile, aligned, require_writable, write
from taktline.checks import read, require_path, require_whole
from taktline.errors import CheckpointError
from taktline.runtime.watchdog import guarded
from taktline.sharding import is_sharded, local

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_WEIGHT_MAP = {"metadata": object, "weight_map": {str: str}}


def save_pretrained(model: HeldModel, folder: Any, max_shard_bytes: int) -> None:
    """Write files that ``from_pretrained`` reads; every process writes its own tensors."""
    path, processes = require_path("folder", folder), model.processes
    require_whole("max_shard_bytes", max_shard_bytes, least=1)
    held = foremost(model.held)

    def begin() -> list[tuple[str, int, int]]:
        path.mkdir(parents=True, exist_ok=True)
        for name, value, _ in held.values():
            require_writable(local(value), name)
        return [(name, priority, value.nbytes) for name, value, priority in held.values()]

    with guarded(processes.transports[0], "save_pretrained()") as call:
        model.arrive(call)
        listed = processes.everywhere(begin, f"save to {path}", call)
        sizes = {name: size for process in listed for name, _, size in process}
        writer = writers([[(name, best) for name, best, _ in process] for process in listed])
        files = _share_out(writer, sizes, max_shard_bytes)

        def write_own() -> None:
            here = [{n: held[n].tensor for n in file.tensors if n in held} for file in files]
            _write(path, files, [aligned(each) for each in here], processes.place)

        def finish() -> None:
            if not processes.place:
                _write_index(path, files, sum(sizes.values()))
                _write_config(model, path)
                sync(path)

        processes.everywhere(write_own, f"write {path}", call)
        processes.everywhere(finish, f"write {path}", call)


class _File(NamedTuple):
    """A file of several, and the process that writes it."""

    name: str
    place: int
    tensors: list[str]


def _share_out(writer: Mapping[str, int], sizes: Mapping[str, int], most: int) -> list[_File]:
    """The tensors of each file, in the order in which all processes write the files."""
    groups: list[tuple[int, list[str]]] = []
    room = 0
    for name, place in sorted(writer.items(), key=lambda each: each[1]):
        if not groups or groups[-1][0] != place or room < sizes[name]:
            groups.append((place, []))
            room = most
        room -= sizes[name]
        groups[-1][1].append(name)
    count = len(groups)
    return [
        _File(SINGLE if count == 1 else f"model-{n:05d}-of-{count:05d}.safetensors", place, names)
        for n, (place, names) in enumerate(groups, 1)
    ]


def _write(
    path: Path, files: Sequence[_File], shapes: Sequence[Mapping[str, torch.Tensor]], place: int
) -> None:
    """Write the files of this process; all processes take part in gathering shards."""
    tensors = (tensor for each in shapes for tensor in each.values())
    values = (each.full_tensor() if is_sharded(each) else each for each in tensors)
    try:
        for file, here in zip(files, shapes, strict=True):
            gathered = islice(values, len(here))
            if file.place == place:
                made = path / f"{file.name}.new"
                write(made, here, gathered)
                made.rename(path / file.name)
            _drain(gathered)
    finally:
        _drain(values)  # other processes wait for the shards of this one, even if it fails


def _drain(values: Iterator[torch.Tensor]) -> None:
    for _ in values:
        pass


def _write_index(path: Path, files: Sequence[_File], size: int) -> None:
    if len(files) > 1:
        weight_map = {name: file.name for file in files for name in file.tensors}
        content = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_text(path / INDEX, json.dumps(content, indent=2))


def _write_config(model: HeldModel, path: Path) -> None:
    """Write the config of the first module that has one; and that of its generation, if any."""
    for module in model.inner_modules():
        configs = [getattr(module, name, None) for name in ("config", "generation_config")]
        if hasattr(configs[0], "save_pretrained"):
            for config in configs:
                if config is not None:
                    config.save_pretrained(path)
            return


class PretrainedFiles(UserDict[str, Any]):
    """The tensors in a folder of safetensors files; each is read when it is used."""

    def __init__(self, folder: Path, prefix: str) -> None:
        """``prefix`` may precede names in the model, and be left out in the files, or reversed."""
        index, files = folder / INDEX, {SINGLE}
        if index.exists():
            with open_file(index) as opened:
                found = read(opened.read(), _WEIGHT_MAP, what=str(index))
            files = set(found["weight_map"].values())
            if any(Path(name).name != name for name in files):
                raise CheckpointError(f"{index} names a file outside of its folder")
        elif not (folder / SINGLE).exists():
            raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE}")
        prefix = f"{prefix}." if prefix else ""
        opened = [TensorFile(folder / each) for each in sorted(files)]
        places = {name: (file, name) for file in opened for name in file.tensors}
        with_it = {f"{prefix}{name}": place for name, place in places.items()}
        without = {name.removeprefix(prefix): place for name, place in places.items()}
        super().__init__(without | with_it | places)

    def __getitem__(self, name: str) -> torch.Tensor:
        file, stored = self.data[name]
        return file.view(stored)


@contextmanager
def _default_dtype(dtype: Any) -> Iterator[None]:
    """Inside, models are built in the type that their config names."""
    before = torch.get_default_dtype()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(source: Any) -> tuple[nn.Module, PretrainedFiles | None]:
    """A model of transformers without values, and the files with the values, if there are any."""
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError("from_pretrained needs transformers: install it") from error
    from taktline.split import deferred

    folder = None if isinstance(source, transformers.PretrainedConfig) else Path(source)
    config: Any = source if folder is None else transformers.AutoConfig.from_pretrained(folder)
    names = getattr(config, "architectures", None) or []
    kind = next((found for name in names if (found := getattr(transformers, name, None))), None)
    with deferred(), _default_dtype(getattr(config, "dtype", None)):
        auto = transformers.AutoModelForCausalLM
        model = auto.from_config(config) if kind is None else kind(config)
    prefix = str(getattr(model, "base_model_prefix", ""))
    return model, None if folder is None else PretrainedFiles(folder, prefix)
