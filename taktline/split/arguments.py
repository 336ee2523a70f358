"""The arguments of a call: how users write them, what kind they are, and those of Hugging Face."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.nested import Absent, attributes_of, is_object

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = tuple[Args, Kwargs]

_CHANGE_STATISTICS = (
    torch.ops.aten.batch_norm.default,
    torch.ops.aten.instance_norm.default,
    torch.ops.aten.native_batch_norm.default,
)
"""Operations that write to running statistics, which their schemas do not say."""


def arguments_of(example: Any) -> Call:
    """An example as positional and keyword arguments.

    >>> arguments_of(((1, 2), {"scale": 3})), arguments_of((1, 2)), arguments_of({"scale": 3})
    (((1, 2), {'scale': 3}), ((1, 2), {}), ((), {'scale': 3}))
    """
    match example:
        case (tuple() as args, dict() as kwargs):
            pass
        case tuple():
            args, kwargs = example, {}
        case Mapping():
            args, kwargs = (), dict(example)
        case torch.Tensor():
            args, kwargs = (example,), {}
        case _:
            raise PartitionError(
                "example must be a tuple of arguments, a dict of keyword arguments, or (args, "
                f"kwargs), not {type(example).__name__}"
            )
    if unnamed := [key for key in kwargs if not isinstance(key, str)]:
        raise PartitionError(
            f"example has the keyword {unnamed[0]!r}, which is not a name; pass names of arguments"
        )
    try:
        tensors_in((args, kwargs))
    except RecursionError:
        raise PartitionError(
            "example has a container that refers to itself; pass what it has, and let the forward "
            "make it"
        ) from None
    return args, kwargs


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested values."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def device_of(tree: Any) -> torch.device:
    """The device of the first tensor in nested values, or the CPU."""
    tensors = tensors_in(tree)
    return tensors[0].device if tensors else torch.device("cpu")


def written_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operation writes to."""
    schema = getattr(op, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else (value,)
    if op in _CHANGE_STATISTICS:
        mean, var, is_training = args[3:6]
        yield from (mean, var) if is_training else ()


_CONSTANTS = (bool, int, float, str, Enum, torch.dtype, torch.device)
_DEPTH = 100


def key_of(value: Any, tensors: list[Any], depth: int = 0) -> Any:
    """All that a forward can see of an argument without its data; adds the tensors in it to a list.

    Without pytree where possible: this runs in each call.
    """
    kind = type(value)
    if kind is Absent or kind is torch.Tensor:
        tensors.append(value)
        return (value.shape, value.dtype)
    if kind is tuple or kind is list:
        return (kind, *[key_of(part, tensors, depth + 1) for part in value])
    if kind is dict:
        return (kind, *[(key, key_of(part, tensors, depth + 1)) for key, part in value.items()])
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return (value.shape, value.dtype)
    if value is None or isinstance(value, _CONSTANTS):
        return (kind, value)
    if kind is slice:
        return (kind, key_of((value.start, value.stop, value.step), tensors, depth + 1))
    if depth > _DEPTH:
        raise PartitionError(
            f"an argument of the model ({kind.__name__}) refers to itself; pass what it has, and "
            "let the forward make it"
        )
    if is_object(value) and kind not in pytree.SUPPORTED_NODES:
        return (kind, key_of(attributes_of(value), tensors, depth + 1))
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda part: type(part) is Absent)
    if spec.is_leaf():
        try:
            hash(value)
        except TypeError as error:
            raise PartitionError(
                f"an argument of the model cannot be compared with that of other calls ({error}); "
                "pass tensors, numbers and texts, also in lists, dicts and dataclasses"
            ) from None
        return value  # compared by its own equality
    return (spec, *[key_of(leaf, tensors, depth + 1) for leaf in leaves])


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
