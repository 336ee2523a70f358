"""The names of a model's tensors in the files of transformers, by its own tables.

transformers 5 keeps the experts of a layer in one tensor, and writes one for each expert::

    in the model:   mlp.experts.gate_up_proj        [experts, 2 * inner, outer]
    in files:       mlp.experts.0.gate_proj.weight  [inner, outer]
                    mlp.experts.0.up_proj.weight    [inner, outer]
                    mlp.experts.1.gate_proj.weight  …
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.errors import CheckpointError, text_of

_log = logging.getLogger("taktline")

Shapes = Mapping[str, torch.Tensor]
"""Tensors on the meta device, by name."""


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
        if not _is_of_transformers(model):
            return None
        known = getattr(model, "_weight_conversions", None)  # those by which it was read
        if known is None:
            tables = _tables()
            known = [] if tables is None else tables.transforms(model, add_legacy=False)
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

    def written(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of a group as they are in files."""
        from transformers.core_model_loading import revert_weight_conversion

        # All that it asks of a model.
        model: Any = _Written(self.config, self.transforms, tensors)
        return _plain(revert_weight_conversion(model, dict(tensors)))


class _Written:
    """Stands for a model of which some tensors are here."""

    def __init__(self, config: Any, transforms: list[Any], tensors: Shapes) -> None:
        self.config, self._weight_conversions, self._tensors = config, transforms, tensors

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def find_sources(model: Any, stored: Shapes) -> dict[str, Source]:
    """What each tensor of a model of transformers is made from, by its name in the model.

    ``stored`` are the tensors in files, on the meta device. The model may lack some of them.
    """
    tables = _tables()
    if tables is None:
        return {}
    transforms = tables.transforms(model)
    converters = [each for each in transforms if isinstance(each, tables.converter)]
    renamings = [each for each in transforms if not isinstance(each, tables.converter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state = model.state_dict()
    prefix = model.base_model_prefix
    sources: dict[str, Source] = {}
    for name in sorted(stored, key=tables.natural_order):
        key, pattern = tables.rename(name, renamings, converters, prefix, state)
        if key not in state and name in state:  # it has the model's own name
            key, pattern = tables.rename(name, [], [], prefix, state)
        if key in state:
            converter = None if pattern is None else by_pattern[pattern]
            sources.setdefault(key, Source(key, {}, converter)).pattern[name] = pattern or ""
    found: dict[str, Source] = {}
    for source in sources.values():
        if source.converter is None:
            found[source.key] = source
            continue
        # Of several tensors that are made at once, only the first is known by its name.
        shapes = {name: stored[name] for name in source.pattern}
        try:
            found |= dict.fromkeys(source.make(model, shapes), source)
        except Exception as error:  # of files that are not complete, or not of this model
            raise CheckpointError(
                f"{source.key} cannot be made from {_listed(list(shapes))}, as transformers would: "
                f"{type(error).__name__}: {text_of(error)}"
            ) from error
    return found


class _Tables(NamedTuple):
    """What is used of transformers; it has no underscores, and no documentation."""

    transforms: Any
    rename: Any
    converter: Any
    natural_order: Any


def _tables() -> _Tables | None:
    """None where transformers lacks them: then files must have the model's own names."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError as error:
        _log.warning(
            "this version of transformers has no table of names in files (%s), so files are read "
            "and written with the names of the model; take transformers 5.22 or 5.23",
            error,
        )
        return None
    return _Tables(
        get_model_conversion_mapping, rename_source_key, WeightConverter, dot_natural_key
    )


def _is_of_transformers(model: nn.Module) -> bool:
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    return isinstance(model, kind)


def _plain(made: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Without the lists of one tensor that some conversions return."""
    return {name: part[0] if isinstance(part, list) else part for name, part in made.items()}


def _listed(names: list[str]) -> str:
    return ", ".join(names if len(names) < 4 else [*names[:2], "…", names[-1]])
