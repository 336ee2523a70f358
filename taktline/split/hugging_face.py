"""What is special about Hugging Face models: they cache keys and values, and collect outputs.

Such a model registers hooks with its layers, which append router logits and the like to lists of
the running model.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from taktline.errors import PartitionError
from taktline.split.arguments import Kwargs

INSTALLED = "_output_capturing_hooks_installed"
"""The attribute that a model sets once it has registered its hooks."""
_CAPTURING = "transformers.utils.output_capturing"


def install_router_hooks(model: nn.Module) -> None:
    """Let a model that collects router logits register its hooks before it is copied."""
    capturing: Any = sys.modules.get(_CAPTURING)
    config = getattr(model, "config", None)
    if capturing is not None and getattr(config, "output_router_logits", False):
        known = capturing._CAN_RECORD_REGISTRY
        install_hooks(part for part in model.modules() if str(type(part)) in known)


def install_hooks(models: Iterable[nn.Module]) -> None:
    """Let models register their hooks before they are copied.

    Otherwise each copy would register hooks of its own with layers that the copies share.
    """
    for model in models:
        sys.modules[_CAPTURING].maybe_install_capturing_hooks(model)


def collected_lists() -> dict[str, list[Any]]:
    """The lists to which hooks of the running model append, by name."""
    collector: Any = getattr(sys.modules.get(_CAPTURING), "_active_collector", None)
    found = None if collector is None else collector.get()
    return {} if not found else {key: part for key, part in found.items() if type(part) is list}


def without_cache(names: Collection[str], kwargs: Kwargs) -> Kwargs:
    """Keywords with ``use_cache=False``, if the model takes that and the user has not set it.

    Most models cache by default, but no stage could return the cache of all layers.
    """
    if "use_cache" not in names or kwargs.get("use_cache") is not None:
        return kwargs
    return {**kwargs, "use_cache": False}


def disable_cache(container: nn.Module) -> None:
    """Turn off the cache of a model inside of one that has no argument for it."""
    config: Any = copy.copy(vars(container).get("config"))
    if getattr(config, "use_cache", False):
        config.use_cache = False
        vars(container)["config"] = config


def require_not_collected(model: nn.Module, kwargs: Kwargs) -> None:
    """Raise if a call asks for the outputs of the layers of all stages."""
    config = getattr(model, "config", None)
    for name in ("output_hidden_states", "output_attentions", "use_cache"):
        default = name != "use_cache" and getattr(config, name, False)
        if kwargs.get(name, default):
            raise PartitionError(
                f"{name} needs the outputs of the layers of all stages, but each stage has only "
                "its own; leave it out, or register hooks on the layers of the pieces"
            )
    if kwargs.get("output_router_logits") and not getattr(config, "output_router_logits", True):
        raise PartitionError(
            "output_router_logits changes the layers; set it before the model is cut: "
            "model.config.output_router_logits = True"
        )


def without_padding(model: nn.Module, dummy: Any) -> Any:
    """An example without padding tokens, of which models warn."""
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    if not isinstance(dummy, torch.Tensor) or not isinstance(padding, int):
        return dummy
    return dummy.where(dummy != padding, padding + 1)
