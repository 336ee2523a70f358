"""Models in the layout of Hugging Face: safetensors in several files, with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from taktline.checkpoint import folder as folders
from taktline.checkpoint.holding import Holding
from taktline.checkpoint.tensor_file import TensorFile, require_writable, write
from taktline.checks import read, require_path, require_whole
from taktline.errors import CheckpointError
from taktline.runtime.watchdog import guarded
from taktline.sharding import is_sharded

__all__ = ["PretrainedFiles", "build", "save_pretrained"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_WEIGHT_MAP = {"metadata": object, "weight_map": {str: str}}


def save_pretrained(holding: Holding, folder: Any, max_shard_bytes: int) -> None:
    """Write files that ``from_pretrained`` reads; every process writes what it has."""
    path, together = require_path("folder", folder), holding.together
    require_whole("max_shard_bytes", max_shard_bytes, least=1)
    with guarded(together.transports[0], "save_pretrained()") as what:
        holding.arrive(what)
        holding.settle()
        error = together.attempt(lambda: _check(holding, path), f"save to {path}")
        told = together.gather([error is not None, _sizes(holding)], what)
        if any(failed for failed, _ in told):
            together.agree(error)
        files = _shared_out([sizes for _, sizes in told], max_shard_bytes)
        error = together.attempt(lambda: _write(holding, path, files), f"write {path}")
        together.agree(error)
        if not together.place:
            sizes = {name: size for _, process in told for name, size, _ in process}
            error = together.attempt(
                lambda: _write_index(holding, path, files, sum(sizes.values())), f"write {path}"
            )
        together.agree(error)


def _check(holding: Holding, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, value, _ in holding.held:
        require_writable(value.to_local() if is_sharded(value) else value, name)


def _sizes(holding: Holding) -> list[tuple[str, int, int]]:
    """The name, the bytes and the weight of what this process has."""
    return [
        (name, value.numel() * value.element_size(), counts) for name, value, counts in holding.held
    ]


def _shared_out(told: list[Any], most: int) -> dict[str, tuple[str, int]]:
    """The file of each tensor, and the process that writes it."""
    writers: dict[str, tuple[int, int, int]] = {}
    for place, process in enumerate(told):
        for name, size, counts in process:
            if name not in writers or writers[name][0] < counts:
                writers[name] = counts, place, size
    groups: list[tuple[int, list[str]]] = []
    for place in range(len(told)):
        room = 0
        for name in [n for n, (_, writer, _) in writers.items() if writer == place]:
            size = writers[name][2]
            if not groups or groups[-1][0] != place or room < size:
                groups.append((place, []))
                room = most
            room -= size
            groups[-1][1].append(name)
    count = len(groups)
    return {
        name: (SINGLE if count == 1 else f"model-{n:05d}-of-{count:05d}.safetensors", place)
        for n, (place, names) in enumerate(groups, 1)
        for name in names
    }


def _write(holding: Holding, path: Path, files: Mapping[str, tuple[str, int]]) -> None:
    """Write the files of this process; a tensor in shards is put together by all that have one."""
    place = holding.together.place
    mine: dict[str, dict[str, torch.Tensor]] = {}
    for name, value, _ in holding.held:
        whole = value.full_tensor() if is_sharded(value) else value
        file, writer = files[name]
        if writer == place and name not in mine.setdefault(file, {}):
            mine[file][name] = whole.cpu() if is_sharded(value) else whole
    for file, tensors in mine.items():
        if tensors:
            write(path / f"{file}.new", tensors)
            (path / f"{file}.new").rename(path / file)


def _write_index(
    holding: Holding, path: Path, files: Mapping[str, tuple[str, int]], size: int
) -> None:
    if {file for file, _ in files.values()} != {SINGLE}:
        content = {
            "metadata": {"total_size": size},
            "weight_map": {name: file for name, (file, _) in files.items()},
        }
        folders.write_text(path / INDEX, json.dumps(content, indent=2))
    for module in (inner for outer in holding.modules for inner in outer.modules()):
        for name in ("config", "generation_config"):
            save = getattr(getattr(module, name, None), "save_pretrained", None)
            if callable(save):
                save(path)
        if hasattr(getattr(module, "config", None), "save_pretrained"):
            break
    folders.sync(path)


class PretrainedFiles(Mapping[str, torch.Tensor]):
    """The tensors of a folder of safetensors files, each read when it is asked for."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """``prefix`` is what names in the model may begin with and those in the files not."""
        index = folder / INDEX
        if index.exists():
            told = read(index.read_bytes(), _WEIGHT_MAP, what=str(index))["weight_map"]
            if any(Path(name).name != name for name in told.values()):
                raise CheckpointError(f"{index} names a file outside of its folder")
            self._files = {file: folder / file for file in sorted(set(told.values()))}
        else:
            self._files = {SINGLE: folder / SINGLE}
            if not (folder / SINGLE).exists():
                raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE}")
        self._prefix = f"{prefix}." if prefix else ""
        self._file_of = {
            name: file for file in map(TensorFile, self._files.values()) for name in file.tensors
        }

    def _found(self, name: str) -> str:
        """What the files call something: they may have been written by a part of the model."""
        others = (name, name.removeprefix(self._prefix), f"{self._prefix}{name}")
        return next((other for other in others if other in self._file_of), name)

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._found(name)
        return self._file_of[found].view(found)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._found(name) in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


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
    """A model of transformers without values, and the files that have them, if there are any."""
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
