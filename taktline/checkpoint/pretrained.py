"""Models in the layout of Hugging Face: safetensors in several files, with an index."""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.checkpoint.conversions import Conversions, Source, find_sources
from taktline.checkpoint.files import open_file
from taktline.checkpoint.folder import sync, write_text
from taktline.checkpoint.model_state import HeldModel, foremost
from taktline.checkpoint.processes import writers
from taktline.checkpoint.tensor_file import TensorFile, require_writable, write
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
    pieces: dict[str, _Piece] = {}

    def begin() -> list[tuple[str, int, dict[str, int]]]:
        path.mkdir(parents=True, exist_ok=True)
        pieces.update(_pieces(model))
        return [(key, piece.priority, piece.sizes()) for key, piece in pieces.items()]

    with guarded(processes.transports[0], "save_pretrained()") as call:
        model.arrive(call)
        listed = processes.everywhere(begin, f"save to {path}", call)
        sizes = {key: names for process in listed for key, _, names in process}
        writer = writers([[(key, best) for key, best, _ in process] for process in listed])
        files = _share_out(
            writer, {key: sum(sizes[key].values()) for key in sizes}, max_shard_bytes
        )

        def write_own() -> None:
            _write(path, files, pieces, processes.place)

        def finish() -> None:
            if not processes.place:
                _write_index(path, files, sizes)
                _write_config(model, path)
                sync(path)

        processes.everywhere(write_own, f"write {path}", call)
        processes.everywhere(finish, f"write {path}", call)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tensors of the model that files have in another form; or one that they have as it is.

    Args:
        held: by their names in the model.
        priority: as in :class:`Held`.
        conversions: make what files have.
    """

    held: dict[str, torch.Tensor]
    priority: int
    conversions: Conversions | None

    def shapes(self) -> dict[str, torch.Tensor]:
        """The tensors in files, on the meta device."""
        return self.written({name: as_meta(tensor) for name, tensor in self.held.items()})

    def sizes(self) -> dict[str, int]:
        """The bytes of each tensor in files."""
        return {name: tensor.nbytes for name, tensor in self.shapes().items()}

    def gathered(self) -> dict[str, torch.Tensor]:
        """All of each tensor; the processes that have shards of it take part."""
        return {
            name: tensor.full_tensor() if is_sharded(tensor) else tensor.detach()
            for name, tensor in self.held.items()
        }

    def written(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's tensors as they are in files."""
        return tensors if self.conversions is None else self.conversions.written(tensors)


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and type, without values."""
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")


def _pieces(model: HeldModel) -> dict[str, _Piece]:
    """What this process has, by the first name in each piece."""
    held, conversions = foremost(model.held), model.state.conversions
    for name, value, _ in held.values():
        require_writable(local(value), name)
    groups = [[name] for name in held] if conversions is None else conversions.groups(held)
    return {
        names[0]: _Piece(
            {name: held[name].tensor for name in names}, held[names[0]].priority, conversions
        )
        for names in groups
    }


class _File(NamedTuple):
    """A file of several, and the process that writes it."""

    name: str
    place: int
    pieces: list[str]


def _share_out(writer: Mapping[str, int], sizes: Mapping[str, int], most: int) -> list[_File]:
    """The pieces of each file, in the order in which all processes write the files."""
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


def _write(path: Path, files: Sequence[_File], pieces: Mapping[str, _Piece], place: int) -> None:
    """Write the files of this process; all processes take part in gathering shards."""
    here = [_aligned([pieces[key] for key in file.pieces if key in pieces]) for file in files]
    values = (piece.gathered() for own in here for piece in own)
    try:
        for file, own in zip(files, here, strict=True):
            gathered = islice(values, len(own))
            if file.place == place:
                made = path / f"{file.name}.new"
                shapes = {name: shape for piece in own for name, shape in piece.shapes().items()}
                write(made, shapes, _converted(own, gathered))
                made.rename(path / file.name)
            _drain(gathered)
    finally:
        _drain(values)  # other processes wait for the shards of this one, even if it fails


def _aligned(pieces: list[_Piece]) -> list[_Piece]:
    """The largest elements first, so that all tensors of a file are aligned."""
    return sorted(pieces, key=lambda piece: -next(iter(piece.held.values())).element_size())


def _converted(
    pieces: Sequence[_Piece], gathered: Iterable[dict[str, torch.Tensor]]
) -> Iterator[torch.Tensor]:
    for piece, whole in zip(pieces, gathered, strict=False):
        yield from piece.written(whole).values()


def _drain(values: Iterator[Any]) -> None:
    for _ in values:
        pass


def _write_index(
    path: Path, files: Sequence[_File], sizes: Mapping[str, Mapping[str, int]]
) -> None:
    if len(files) > 1:
        weight_map = {
            name: file.name for file in files for piece in file.pieces for name in sizes[piece]
        }
        size = sum(sum(names.values()) for names in sizes.values())
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
    """The tensors in a folder of safetensors files, by their names in a model.

    Each is read when it is used.
    """

    def __init__(self, folder: Path, model: Any) -> None:
        index, files = folder / INDEX, {SINGLE}
        if index.exists():
            with open_file(index) as opened:
                found = read(opened.read(), _WEIGHT_MAP, what=str(index))
            files = set(found["weight_map"].values())
            if any(Path(name).name != name for name in files):
                raise CheckpointError(f"{index} names a file outside of its folder")
        elif not (folder / SINGLE).exists():
            raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE}")
        opened = [TensorFile(folder / each) for each in sorted(files)]
        self._model = model
        self._places = {name: file for file in opened for name in file.tensors}
        shapes = {name: file.shape(name) for name, file in self._places.items()}
        # A prefix may precede names in the model, and be left out in the files, or reversed.
        prefix = f"{found}." if (found := getattr(model, "base_model_prefix", "")) else ""
        as_is = {name: Source(name, {name: ""}) for name in shapes}
        with_it = {f"{prefix}{name}": source for name, source in as_is.items()}
        without = {name.removeprefix(prefix): source for name, source in as_is.items()}
        super().__init__(without | with_it | as_is | find_sources(model, shapes))

    def __getitem__(self, name: str) -> torch.Tensor:
        source = self.data[name]
        stored = {each: self._places[each].view(each) for each in source.pattern}
        if source.converter is None:
            return next(iter(stored.values()))
        return source.make(self._model, stored)[name]


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
    return model, None if folder is None else PretrainedFiles(folder, model)
