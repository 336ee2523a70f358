"""What models of transformers do beside others: they cache keys and values, and collect outputs.

They collect the logits of routers and the like by hooks on what is inside of their layers, which
put them into lists of the model that is running.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from taktline.errors import PartitionError
from taktline.split.example import Kwargs

__all__ = [
    "INSTALLED",
    "forget_caches",
    "hook",
    "hook_routers",
    "lists",
    "require_not_collected",
    "without_cache",
    "without_padding",
]

INSTALLED = "_output_capturing_hooks_installed"
"""The attribute of a model that says that it has its hooks."""


_COLLECTING = "transformers.utils.output_capturing"


def hook_routers(model: nn.Module) -> None:
    """Let a model that collects the logits of routers have its hooks before it is copied."""
    collecting: Any = sys.modules.get(_COLLECTING)
    if collecting is not None and getattr(
        getattr(model, "config", None), "output_router_logits", False
    ):
        known = collecting._CAN_RECORD_REGISTRY
        hook(part for part in model.modules() if str(type(part)) in known)


def hook(models: Iterable[nn.Module]) -> None:
    """Let models have their hooks before they are copied.

    Copies would register them each by themselves, with layers that they share.
    """
    for model in models:
        sys.modules[_COLLECTING].maybe_install_capturing_hooks(model)


def _collector() -> Any:
    return getattr(sys.modules.get(_COLLECTING), "_active_collector", None)


def lists() -> dict[str, list[Any]]:
    """The lists of the model that is running, by the names of what they collect."""
    collector = _collector()
    found = None if collector is None else collector.get()
    return {} if not found else {key: part for key, part in found.items() if type(part) is list}


def without_cache(names: Collection[str], kwargs: Kwargs) -> Kwargs:
    """Keywords that keep a model from caching keys and values, if they are among its arguments.

    Most do so unless told otherwise. No stage could return the cache of all layers.
    """
    if "use_cache" not in names or kwargs.get("use_cache") is not None:
        return kwargs
    return {**kwargs, "use_cache": False}


def forget_caches(container: nn.Module) -> None:
    """Keep a model inside of another one, which has no argument for it, from caching."""
    config: Any = copy.copy(vars(container).get("config"))
    if getattr(config, "use_cache", False):
        config.use_cache = False
        vars(container)["config"] = config


def require_not_collected(model: nn.Module, kwargs: Kwargs) -> None:
    """Raise if a model is to collect what layers return, in all stages."""
    config = getattr(model, "config", None)
    for name in ("output_hidden_states", "output_attentions", "use_cache"):
        default = name != "use_cache" and getattr(config, name, False)
        if kwargs.get(name, default):
            raise PartitionError(
                f"{name} asks for what the layers of all stages return, and each stage has only "
                "its own; leave it out, or register hooks with the layers of the pieces"
            )
    if kwargs.get("output_router_logits") and not getattr(config, "output_router_logits", True):
        raise PartitionError(
            "output_router_logits asks for what is inside of the layers; say so before the model "
            "is cut: model.config.output_router_logits = True"
        )


def without_padding(model: nn.Module, dummy: Any) -> Any:
    """An example of words in which none is what fills up short texts: models warn of these."""
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    if not isinstance(dummy, torch.Tensor) or not isinstance(padding, int):
        return dummy
    return dummy.where(dummy != padding, padding + 1)
