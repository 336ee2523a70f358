"""Runs operations of torch without data, to find the shapes and types of their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.arguments import Args, Kwargs

META = torch.device("meta")
_MASKS = (torch.bool, torch.uint8)
"""The types of an index whose data decides how many elements it selects."""


def size_depends_on_data(func: Any, args: Sequence[Any]) -> bool:
    """Whether the shape of an operation's result depends on data."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in _MASKS for index in args[1])


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device with the same shape, strides and type."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def run_on_meta(func: Any, args: Args, kwargs: Kwargs, context: Any, source: Any) -> Any:
    """The result of an operation on the meta device; if it needs data, that for zeros."""
    try:
        return func(*args, **kwargs)
    except Exception as error:
        if not context.runs_model and not isinstance(error, NotImplementedError):
            raise
        if func.overloadpacket is torch.ops.aten._pack_padded_sequence:
            raise missing_data(source, "a packed sequence") from error
        if not context.runs_model or torch.Tag.data_dependent_output in func.tags:
            raise missing_data(source, str(func)) from error
        return _run_filled(func, args, kwargs, most=False)


def run_with_sizes(func: Any, args: Args, kwargs: Kwargs, context: Any, maker: str) -> Any:
    """The result of an operation whose shape depends on data, in the sizes that the context has."""
    most, least = (_run_filled(func, args, kwargs, most=most) for most in (True, False))

    def sized(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        likely = zip(one.shape, other.shape, strict=True)
        shape = [context.numbers.take_size(sizes, maker) for sizes in likely]
        return torch.empty(shape, dtype=one.dtype, device=META)

    return pytree.tree_map(sized, most, least)


def _run_filled(func: Any, args: Args, kwargs: Kwargs, *, most: bool) -> Any:
    """The result for zeros, or for data that makes the result as large as possible."""

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            is_mask = leaf.dtype in _MASKS
            # An index other than 0 may be out of range.
            is_index = func is torch.ops.aten.index.Tensor and not is_mask
            if is_mask or is_index or not most:
                return torch.full(tuple(leaf.shape), most and is_mask, dtype=leaf.dtype)
            return torch.arange(leaf.numel(), dtype=leaf.dtype).view(leaf.shape)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    args, kwargs = pytree.tree_map(filled, (args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return pytree.tree_map_only(torch.Tensor, to_meta, func(*args, **kwargs))


def missing_data(source: Any, what: str) -> PartitionError:
    """The error of a forward that needs data which another stage has."""
    return PartitionError(
        f"the forward needs {what}, which depends on the data that {source.maker!r} returns; every "
        "stage runs the forward, but only one has that data; cut the model elsewhere, or by hand"
    )
