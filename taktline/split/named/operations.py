"""What operations of torch return without data: shapes and types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.example import Args, Kwargs

__all__ = ["META", "depends_on_data", "made", "no_data", "on_meta", "sized"]

META = torch.device("meta")
_INDICES = (torch.bool, torch.uint8)
"""The types of an index whose data decides how much is taken."""


def depends_on_data(func: Any, args: Sequence[Any]) -> bool:
    """Whether the shape of what an operation returns depends on data."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in _INDICES for index in args[1])


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device with the same shape, strides and type."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def made(func: Any, args: Args, kwargs: Kwargs, context: Any, source: Any) -> Any:
    """What an operation returns without data; of zeros, if it cannot do without."""
    try:
        return func(*args, **kwargs)
    except Exception as error:
        if not context.mixed and not isinstance(error, NotImplementedError):
            raise
        if func.overloadpacket is torch.ops.aten._pack_padded_sequence:
            raise no_data(source, "a packed sequence") from error
        if not context.mixed or torch.Tag.data_dependent_output in func.tags:
            raise no_data(source, str(func)) from error
        return _filled(func, args, kwargs, most=False)


def sized(func: Any, args: Args, kwargs: Kwargs, context: Any, maker: str) -> Any:
    """What an operation returns whose shape depends on data, in the sizes that it had there."""
    most, least = (_filled(func, args, kwargs, most=all_) for all_ in (True, False))

    def taken(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        likely = zip(one.shape, other.shape, strict=True)
        shape = [context.numbers.take_size(sizes, maker) for sizes in likely]
        return torch.empty(shape, dtype=one.dtype, device=META)

    return pytree.tree_map(taken, most, least)


def _filled(func: Any, args: Args, kwargs: Kwargs, *, most: bool) -> Any:
    """What an operation that needs data returns for zeros; or for data that makes most of it."""
    device = torch.device("cpu")

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            is_mask = leaf.dtype in _INDICES
            # Other places than the first may be beyond the end.
            is_place = func is torch.ops.aten.index.Tensor and not is_mask
            if is_mask or is_place or not most:
                return torch.full(tuple(leaf.shape), most and is_mask, dtype=leaf.dtype)
            return torch.arange(leaf.numel(), dtype=leaf.dtype).view(leaf.shape)
        return device if isinstance(leaf, torch.device) else leaf

    args, kwargs = pytree.tree_map(filled, (args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return pytree.tree_map_only(torch.Tensor, on_meta, func(*args, **kwargs))


def no_data(source: Any, what: str) -> PartitionError:
    return PartitionError(
        f"the forward asks for {what}, which depends on the data that {source.maker!r} returns, "
        "but only one stage has that data, while each stage goes through the forward; cut the "
        "model elsewhere, or by hand"
    )
