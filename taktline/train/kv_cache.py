"""Keys and values of earlier words, kept by the stages of a model of transformers.

A stage runs the forward of the whole model, with nothing in the place of other stages' layers. So
the parts of the model that hand a cache to their layers are lent one, in which the layers of other
stages have a length alone::

    layer        0    1    2    3
    stage 0    [keys values]  ·····    a cache for each micro-batch
    stage 1     ·····  [keys values]
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle

from taktline.errors import UseError
from taktline.runtime.microbatch import split_value
from taktline.split.named.placeholder import Placeholder

__all__ = ["Keeper", "cache_of", "padding_of"]

_PAST = "past_key_values"


def cache_of(model: Any) -> Callable[[], Any] | None:
    """What makes a cache for a model of transformers, if each layer of it needs its own alone."""
    if model is None or not _lenders(model) or getattr(model.config, "num_kv_shared_layers", 0):
        return None
    if getattr(model, "_is_stateful", False):  # modules keep a state, of one micro-batch
        return None
    from transformers import DynamicCache

    class StageCache(DynamicCache):
        """Keeps the keys and values of the layers of one stage."""

        def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any) -> Any:
            kept = getattr(self.layers[layer_idx], "keys", None)
            has_length_alone = kept is not None and kept.shape[-1:] == (1,)
            if not isinstance(key_states, Placeholder) and not has_length_alone:
                return super().update(key_states, value_states, layer_idx, *args)
            # A layer of another stage, of which only shapes are asked for.
            new = key_states.shape[-2]
            earlier = (0, 0, self.get_mask_sizes(new, layer_idx)[0] - new, 0)
            return pad(key_states, earlier), pad(value_states, earlier)

    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    plain = kinds and kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"}
    return partial(StageCache, config=model.config) if plain else None


def _lenders(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that take a cache and hand it to their layers."""
    return [
        module
        for name, module in model.named_modules()
        if name and not any(map(str.isdigit, name.split("."))) and _takes(module, _PAST)
    ]


def _takes(module: nn.Module, name: str) -> bool:
    """Whether a module has such an argument; a stage takes what its model takes."""
    forwards = [vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind)]
    return any(name in inspect.signature(forward).parameters for forward in forwards)


def padding_of(mask: torch.Tensor | None, module: nn.Module | None, new: int) -> dict[str, Any]:
    """The arguments for padded texts, if so many words of each are new."""
    if mask is None:
        return {}
    told = {"attention_mask": mask}
    if module is not None and _takes(module, "position_ids"):
        told["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -new:]
    return told


class Keeper:
    """One stage while it generates: the keys and values of its layers, for each micro-batch.

    Its parts are lent a cache, and the mask of padded texts, as they are called.
    """

    def __init__(self, module: nn.Module, caches: Mapping[int, Any]) -> None:
        """``caches`` are by micro-batch, in the order in which the stage computes them."""
        self._caches = caches
        self._turns = itertools.cycle(caches)
        self._now = 0
        self._new = 0
        self._length = 0
        self._mask: Sequence[torch.Tensor] | None = None
        layers = [m for m in module.modules() if isinstance(getattr(m, "layer_idx", None), int)]
        self._own = {m.layer_idx for m in layers if next(m.parameters(), None) is not None}

    def hook(self, module: nn.Module) -> list[RemovableHandle]:
        """Let a stage keep its keys and values from now on."""
        return [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end),
            *(
                part.register_forward_pre_hook(self._lend, with_kwargs=True)
                for part in _lenders(module)
            ),
        ]

    def expect(self, length: int, new: int, mask: torch.Tensor | None) -> None:
        """Texts of such a length come, of which so much is new."""
        self._length, self._new = length, new
        parts = len(self._caches)
        self._mask = None if mask is None else split_value(mask, parts, name="attention_mask")

    def _begin(self, *_: Any) -> None:
        """The next micro-batch is to be computed."""
        self._now = next(self._turns)

    def _lend(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Let a part of the model use the cache."""
        mask = None if self._mask is None else self._mask[self._now]
        lent = {_PAST: self._caches[self._now], "use_cache": True}
        return args, {**kwargs, **lent, **padding_of(mask, module, self._new)}

    def _end(self, *_: Any) -> None:
        """Let the layers of other stages be as long: masks and places depend on it."""
        for number, layer in enumerate(self._caches[self._now].layers):
            missing = self._length - layer.get_seq_length()
            if missing and number in self._own:
                raise UseError(
                    f"layer {number} does not keep its keys and values as models of transformers "
                    "do; pass use_cache=False"
                )
            if missing:
                nothing = torch.zeros(1, 1, missing, 1)
                layer.update(nothing, nothing)
