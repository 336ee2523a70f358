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
import os
import re
import sys
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from taktline.checkpoint import files
from taktline.checkpoint.files import TensorFile, open_file
from taktline.checkpoint.model_state import ModelState, first_of_each, writers
from taktline.checks import check, read
from taktline.errors import CheckpointError, text_of
from taktline.meta import is_sharded, local
from taktline.text import first_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_WRITTEN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|\d{5}-\d{5}\.new")
_WEIGHT_MAP = {"metadata": object, "weight_map": {str: str}}
Convert: TypeAlias = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
_log = logging.getLogger("taktline")


def conversions_of(model: nn.Module) -> Convert | None:
    """How transformers converts the tensors of its model for files; None where it does not."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    if not isinstance(model, kind):
        return None
    known: Any = getattr(model, "_weight_conversions", None)  # those by which it was read
    if known is None:
        # Nobody knows whether files would have had the prefix.
        known = [e for e in _transforms(model, add_legacy=False) if not hasattr(e, "prefix_to_add")]
    return partial(_for_files, model.config, list(known)) if known else None


def _for_files(
    config: Any, transforms: list[Any], tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors of a model as they are in files."""
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = SimpleNamespace(  # with all that it asks of a model
        config=config, _weight_conversions=transforms, get_parameter=tensors.__getitem__
    )
    return _plain(revert_weight_conversion(model, dict(tensors)))


def save_pretrained(model: ModelState, folder: Any, max_shard_bytes: int) -> None:
    """Write files that ``from_pretrained`` reads; every process writes its own tensors."""
    path = check("folder", folder, Path)
    check("max_shard_bytes", max_shard_bytes, int, least=1)
    everywhere = model.processes.everywhere
    with model.together("save_pretrained()") as call:
        writer = writers(everywhere(partial(_begin, model, path), f"save to {path}", call))
        write = partial(_write, model, path, writer, max_shard_bytes)
        written = everywhere(write, f"write {path}", call)
        everywhere(partial(_finish, model, path, written), f"write {path}", call)


def _begin(model: ModelState, path: Path) -> list[str]:
    """Make the folder; returns the names of all tensors here."""
    path.mkdir(parents=True, exist_ok=True)
    held = first_of_each(model.saved())
    for name, value in held.items():
        files.require_writable(local(value), name)
    return list(held)


def _part(path: Path, place: int, number: int) -> Path:
    """A file of a process until all have written theirs."""
    return path / f"{place:05d}-{number:05d}.new"


def _write(
    model: ModelState, path: Path, writer: Mapping[str, int], most: int
) -> list[dict[str, int]]:
    """Write files of so many bytes; returns the tensors in each, with their bytes.

    Processes that have shards of one tensor take part, in the same order.
    """
    own: dict[str, torch.Tensor] = {}
    for name, held in first_of_each(model.saved()).items():
        value = held.detach()
        whole = value.full_tensor() if is_sharded(value) else value
        if writer[name] == model.processes.place:
            own[name] = whole.cpu()
    convert: Convert | None = model.conversions
    found: list[dict[str, torch.Tensor]] = []
    room = 0
    for name, tensor in (own if convert is None else convert(own)).items():
        if not found or room < tensor.nbytes:
            found.append({})
            room = most
        found[-1][name] = tensor
        room -= tensor.nbytes
    for number, tensors in enumerate(found):
        files.write(_part(path, model.processes.place, number), tensors)
    return [{name: tensor.nbytes for name, tensor in tensors.items()} for tensors in found]


def _finish(model: ModelState, path: Path, written: Sequence[Sequence[Mapping[str, int]]]) -> None:
    """Name the files, write the index and the configs of the first module with one; on rank 0."""
    if model.processes.place:
        return
    parts = [(place, n) for place, listed in enumerate(written) for n in range(len(listed))]
    place_of: dict[str, str] = {}
    for number, (place, n) in enumerate(parts, 1):
        count = len(parts)
        file = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        _part(path, place, n).rename(path / file)
        place_of |= dict.fromkeys(written[place][n], file)
    new = set(place_of.values())
    if len(parts) > 1:
        new.add(INDEX)
        size = sum(sum(tensors.values()) for listed in written for tensors in listed)
        content = {"metadata": {"total_size": size}, "weight_map": place_of}
        files.write_text(path / INDEX, json.dumps(content, indent=2))
    for module in model.inner_modules():
        configs = [getattr(module, name, None) for name in ("config", "generation_config")]
        if hasattr(configs[0], "save_pretrained"):
            for config in filter(None, configs):
                config.save_pretrained(path)
            break
    for name in filter(_WRITTEN.fullmatch, os.listdir(path)):
        if name not in new:  # of an earlier save: it might be read instead
            (path / name).unlink()
    files.sync(path)


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
            raise CheckpointError(
                f"{source.key} cannot be made from {first_of([*source.pattern])}, as transformers "
                f"would: {type(error).__name__}: {text_of(error)}"
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
        text = "from_pretrained needs transformers: pip install 'taktline[transformers]'"
        raise CheckpointError(text) from error
    from taktline.split import deferred

    folder = None if isinstance(source, transformers.PretrainedConfig) else Path(source)
    config: Any = source if folder is None else transformers.AutoConfig.from_pretrained(folder)
    if folder is not None and getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(
            f"the weights in {folder} are quantised, and are not read in parts; load the model "
            "with AutoModelForCausalLM.from_pretrained(…), and pass it to Pipeline"
        )
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
