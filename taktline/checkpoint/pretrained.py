"""Models in the layout of Hugging Face: safetensors in several files, with an index.

transformers 5 keeps the experts of a layer in one tensor, and writes one for each expert; its own
tables say how::

    in the model:   mlp.experts.gate_up_proj        [experts, 2 * inner, outer]
    in files:       mlp.experts.0.gate_proj.weight  [inner, outer]
                    mlp.experts.0.up_proj.weight    [inner, outer]
                    mlp.experts.1.gate_proj.weight  …
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.checkpoint.folder import sync, write_text
from taktline.checkpoint.model_state import Held, HeldModel, foremost, writers
from taktline.checkpoint.tensor_file import TensorFile, open_file, require_writable, write
from taktline.checks import read, require_path, require_whole
from taktline.errors import CheckpointError, text_of
from taktline.runtime.watchdog import guarded
from taktline.sharding import is_sharded, local

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_WEIGHT_MAP = {"metadata": object, "weight_map": {str: str}}
_log = logging.getLogger("taktline")


@dataclass(frozen=True, slots=True)
class Conversions:
    """How transformers converts the tensors of a model when it writes files.

    Args:
        config: the model's.
        transforms: its own objects; their order is that of reading.
    """

    config: Any
    transforms: list[Any]

    @classmethod
    def of(cls, model: nn.Module) -> Conversions | None:
        """Those of a model of transformers; None if it has none, or needs none."""
        kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
        if not isinstance(model, kind):
            return None
        known: Any = getattr(model, "_weight_conversions", None)  # those by which it was read
        if known is None:
            known = _transforms(model, add_legacy=False)
            # Nobody knows whether files would have had the prefix.
            known = [each for each in known if not hasattr(each, "prefix_to_add")]
        return cls(model.config, list(known)) if known else None

    def groups(self, names: Iterable[str]) -> list[list[str]]:
        """Names of tensors of the model, together if they are converted together."""
        from transformers.core_model_loading import WeightConverter, rename_source_key

        back: list[Any] = [each.reverse_transform() for each in reversed(self.transforms)]
        converters = [each for each in back if isinstance(each, WeightConverter)]
        found: dict[tuple[str, str], list[str]] = {}
        for name in names:
            renamed, pattern = rename_source_key(name, [], converters)
            key = ("", name) if pattern is None else ("converted", renamed)
            found.setdefault(key, []).append(name)
        return list(found.values())

    def written(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of the model as they are in files."""
        from transformers.core_model_loading import revert_weight_conversion

        # All that it asks of a model.
        model: Any = _Written(self.config, self.transforms, tensors)
        return _plain(revert_weight_conversion(model, dict(tensors)))


class _Written:
    """Stands for a model of which some tensors are here."""

    def __init__(self, config: Any, transforms: list[Any], tensors: dict[str, Any]) -> None:
        self.config, self._weight_conversions = config, transforms
        self.get_parameter = tensors.__getitem__


class _File(NamedTuple):
    """A file of several: the process that writes it, and the names in the model of its tensors."""

    name: str
    place: int
    tensors: list[str]


def save_pretrained(model: HeldModel, folder: Any, max_shard_bytes: int) -> None:
    """Write files that ``from_pretrained`` reads; every process writes its own tensors."""
    path, processes = require_path("folder", folder), model.processes
    require_whole("max_shard_bytes", max_shard_bytes, least=1)
    held = foremost(model.held)
    with guarded(processes.transports[0], "save_pretrained()") as call:
        model.arrive(call)
        begin = partial(_begin, model, held, path)
        listed = processes.everywhere(begin, f"save to {path}", call)
        files = _share_out(listed, max_shard_bytes)
        own = partial(_write, model, held, path, files)
        written = processes.everywhere(own, f"write {path}", call)
        names = {name: file for process in written for name, file in process.items()}
        finish = partial(_finish, model, path, names)
        processes.everywhere(finish, f"write {path}", call)


def _begin(model: HeldModel, held: Mapping[str, Held], path: Path) -> list[tuple[Any, int, int]]:
    """The tensors of this process: names that are converted together, priority, and bytes."""
    path.mkdir(parents=True, exist_ok=True)
    for name, value, _ in held.values():
        require_writable(local(value), name)
    conversions: Conversions | None = model.state.conversions
    groups = [[name] for name in held] if conversions is None else conversions.groups(held)
    return [
        (names, held[names[0]].priority, sum(held[name].tensor.nbytes for name in names))
        for names in groups
    ]


def _share_out(listed: Sequence[Sequence[tuple[list[str], int, int]]], most: int) -> list[_File]:
    """The tensors of each file, in the order in which all processes write the files."""
    groups = {names[0]: (names, size) for process in listed for names, _, size in process}
    writer = writers([[(names[0], best) for names, best, _ in process] for process in listed])
    found: list[tuple[int, list[str]]] = []
    room = 0
    for key, place in sorted(writer.items(), key=lambda each: each[1]):
        names, size = groups[key]
        if not found or found[-1][0] != place or room < size:
            found.append((place, []))
            room = most
        room -= size
        found[-1][1].extend(names)
    count = len(found)
    return [
        _File(SINGLE if count == 1 else f"model-{n:05d}-of-{count:05d}.safetensors", place, names)
        for n, (place, names) in enumerate(found, 1)
    ]


def _write(
    model: HeldModel, held: Mapping[str, Held], path: Path, files: Sequence[_File]
) -> dict[str, tuple[str, int]]:
    """Write the files of this process; returns the file and the bytes of each tensor in them.

    All processes take part in gathering shards, even after one has failed.
    """
    conversions, written, failed = model.state.conversions, dict[str, tuple[str, int]](), None
    for file in files:
        mine, tensors = file.place == model.processes.place, dict[str, torch.Tensor]()
        for name in (name for name in file.tensors if name in held):
            value = held[name].tensor.detach()
            whole = value.full_tensor() if is_sharded(value) else value
            if mine:
                tensors[name] = whole.cpu() if is_sharded(value) else whole
        if not mine or failed is not None:
            continue
        try:
            tensors = tensors if conversions is None else conversions.written(tensors)
            write(path / f"{file.name}.new", tensors)
            (path / f"{file.name}.new").rename(path / file.name)
            written |= {name: (file.name, tensor.nbytes) for name, tensor in tensors.items()}
        except Exception as error:
            failed = error
    if failed is not None:
        raise failed
    return written


def _finish(model: HeldModel, path: Path, names: Mapping[str, tuple[str, int]]) -> None:
    """Write the index, and the configs of the first module that has one; on the first process."""
    if model.processes.place:
        return
    if len({file for file, _ in names.values()}) > 1:
        content = {
            "metadata": {"total_size": sum(size for _, size in names.values())},
            "weight_map": {name: file for name, (file, _) in names.items()},
        }
        write_text(path / INDEX, json.dumps(content, indent=2))
    for module in model.inner_modules():
        configs = [getattr(module, name, None) for name in ("config", "generation_config")]
        if hasattr(configs[0], "save_pretrained"):
            for config in filter(None, configs):
                config.save_pretrained(path)
            break
    sync(path)


class Source(NamedTuple):
    """What one or several tensors of a model are made from."""

    key: str
    """The name of the first of them."""
    pattern: dict[str, str]
    """Names in the files, in order; and of each, the pattern that it fits, if it is converted."""
    converter: Any = None
    """Makes the tensors; without it, there is one, which the file has as it is."""

    def make(self, model: Any, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's tensors from those in files."""
        one = copy.deepcopy(self.converter)
        for name, pattern in self.pattern.items():
            one.add_tensor(self.key, name, pattern, stored[name])
        return _plain(one.convert(self.key, model=model, config=model.config))


def _plain(made: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Without the lists of one tensor that some conversions return."""
    return {name: part[0] if isinstance(part, list) else part for name, part in made.items()}


def _find_sources(model: Any, stored: Mapping[str, torch.Tensor]) -> dict[str, Source]:
    """What each tensor of a model of transformers is made from, by its name in the model.

    ``stored`` are the tensors in files, on the meta device. The model may lack some of them.
    """
    from transformers import core_model_loading as core

    transforms = _transforms(model)
    converters = [each for each in transforms if isinstance(each, core.WeightConverter)]
    renamings = [each for each in transforms if not isinstance(each, core.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    sources: dict[str, Source] = {}
    for name in sorted(stored, key=core.dot_natural_key):
        key, pattern = core.rename_source_key(name, renamings, converters, prefix, state)
        if key not in state and name in state:  # it has the model's own name
            key, pattern = core.rename_source_key(name, [], [], prefix, state)
        if key in state:
            converter = None if pattern is None else by_pattern[pattern]
            sources.setdefault(key, Source(key, {}, converter)).pattern[name] = pattern or ""
    found: dict[str, Source] = {}
    for source in sources.values():
        if source.converter is None:
            found[source.key] = source
            continue
        # Of several tensors that are made at once, only the first is known by its name.
        try:
            found |= dict.fromkeys(source.make(model, stored), source)
        except Exception as error:  # of files that are not complete, or not of this model
            names = list(source.pattern)
            listed = ", ".join(names if len(names) < 4 else [*names[:2], "…", names[-1]])
            raise CheckpointError(
                f"{source.key} cannot be made from {listed}, as transformers would: "
                f"{type(error).__name__}: {text_of(error)}"
            ) from error
    return found


def _transforms(model: Any, **options: Any) -> list[Any]:
    """The table of a model of transformers; empty in versions without one."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError as error:
        _log.warning(
            "this version of transformers has no table of names in files (%s), so files are read "
            "and written with the names of the model; take transformers 5.22 or 5.23",
            error,
        )
        return []
    return list(get_model_conversion_mapping(model, **options))


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
        self._files = {name: file for file in opened for name in file.tensors}
        shapes = {name: file.view(name).to("meta") for name, file in self._files.items()}
        super().__init__(_find_sources(model, shapes))

    def __getitem__(self, name: str) -> torch.Tensor:
        source = self.data[name]
        stored = {each: self._files[each].view(each) for each in source.pattern}
        if source.converter is None:
            return next(iter(stored.values()))
        return source.make(self._model, stored)[name]


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
    before, dtype = torch.get_default_dtype(), getattr(config, "dtype", None)
    try:
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            torch.set_default_dtype(dtype)
        with deferred():
            auto = transformers.AutoModelForCausalLM
            model = auto.from_config(config) if kind is None else kind(config)
    finally:
        torch.set_default_dtype(before)
    return model, None if folder is None else PretrainedFiles(folder, model)
