"""Keys and values of earlier tokens, kept for each micro-batch of a model of transformers."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from taktline.errors import UseError
from taktline.runtime.microbatch import split_value
from taktline.stage.names import unwrapped

_PAST = "past_key_values"


def cache_of(model: Any) -> Callable[[], Any] | None:
    """A function that makes a cache for a model of transformers; None if it cannot be cut."""
    if model is None or not _cache_users(model) or getattr(model.config, "num_kv_shared_layers", 0):
        return None
    if getattr(model, "_is_stateful", False):  # modules keep the state of one micro-batch
        return None
    from transformers import DynamicCache

    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    plain = kinds and kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"}
    return partial(DynamicCache, config=model.config) if plain else None


def _cache_users(model: nn.Module) -> list[nn.Module]:
    """The modules that take a cache and pass it to their layers."""
    return [
        module
        for name, module in unwrapped(model).named_modules()
        if name and not any(map(str.isdigit, name.split("."))) and _takes(module, _PAST)
    ]


def _takes(module: nn.Module, name: str) -> bool:
    """Whether the forward of a module has such an argument; a stage has those of its model."""
    forwards = [vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind)]
    return any(name in inspect.signature(forward).parameters for forward in forwards)


def padding_of(mask: torch.Tensor | None, module: nn.Module | None, new: int) -> dict[str, Any]:
    """The arguments for padded texts, of which so many tokens are new."""
    if mask is None:
        return {}
    found = {"attention_mask": mask}
    if module is not None and _takes(module, "position_ids"):
        found["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -new:]
    return found


class Keeper:
    """The keys and values of each micro-batch, while a model in one stage generates.

    Hooks pass its modules a cache, and the mask of padded texts.
    """

    def __init__(self, caches: Mapping[int, Any]) -> None:
        """``caches`` are by micro-batch, in the order in which the stage computes them."""
        self._caches = caches
        self._turns = itertools.cycle(caches)
        self._now = 0
        self._new = 0
        self._length = 0
        self._mask: Sequence[torch.Tensor] | None = None

    def hook(self, module: nn.Module) -> list[RemovableHandle]:
        """Register the hooks on a stage."""
        return [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end),
            *(
                part.register_forward_pre_hook(self._pass_cache, with_kwargs=True)
                for part in _cache_users(module)
            ),
        ]

    def expect(self, length: int, new: int, mask: torch.Tensor | None) -> None:
        """Set the length of the next texts, and how many of their tokens are new."""
        self._length, self._new = length, new
        parts = len(self._caches)
        self._mask = None if mask is None else split_value(mask, parts, name="attention_mask")

    def _begin(self, *_: Any) -> None:
        """Turn to the next micro-batch."""
        self._now = next(self._turns)

    def _pass_cache(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Add the cache to the arguments of a module."""
        mask = None if self._mask is None else self._mask[self._now]
        given = {_PAST: self._caches[self._now], "use_cache": True}
        return args, {**kwargs, **given, **padding_of(mask, module, self._new)}

    def _end(self, *_: Any) -> None:
        """Raise if a layer has kept nothing."""
        for number, layer in enumerate(self._caches[self._now].layers):
            if layer.get_seq_length() != self._length:
                raise UseError(
                    f"layer {number} does not keep its keys and values as models of transformers "
                    "do; pass use_cache=False"
                )
