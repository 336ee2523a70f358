"""What is special about Hugging Face models: they cache keys and values, unless told not to."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from taktline.errors import PartitionError
from taktline.split.arguments import Kwargs


def without_cache(names: Collection[str], kwargs: Kwargs) -> Kwargs:
    """Keywords with ``use_cache=False``, if the model takes that and the user has not set it.

    Most models cache by default, but no stage could return the cache of all layers.
    """
    if "use_cache" not in names or kwargs.get("use_cache") is not None:
        return kwargs
    return {**kwargs, "use_cache": False}


def disable_cache(container: nn.Module) -> None:
    """Turn off the cache of a model inside of one that has no argument for it."""
    config: Any = vars(container).get("config")
    if getattr(config, "use_cache", False):
        config = copy.copy(config)
        config.use_cache = False
        vars(container)["config"] = config


def require_no_cache(kwargs: Kwargs) -> None:
    """Raise if a call asks for the cache of all layers."""
    if kwargs.get("use_cache"):
        raise PartitionError(
            "use_cache needs the keys and values of the layers of all stages, but each stage has "
            "only its own; leave it out"
        )


def without_padding(model: nn.Module, dummy: Any) -> Any:
    """An example without padding tokens, of which models warn."""
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    if not isinstance(dummy, torch.Tensor) or not isinstance(padding, int):
        return dummy
    return dummy.where(dummy != padding, padding + 1)
