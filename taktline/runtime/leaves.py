"""The leaves of arguments and outputs: how each kind is described, cut into pieces, and joined.

Plain tensors, FlexAttention's block masks, and tensors that are spread over a device mesh.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from taktline.errors import BatchError
from taktline.meta import TensorMeta
from taktline.pytree import TreeSpec, tree_flatten
from taktline.sharding import is_sharded
from taktline.text import counted

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["bounds", "children", "cut", "describe", "flatten", "is_block_mask", "join", "same"]


def children(value: Any) -> dict[Any, Any] | None:
    """What a container holds, by key or position; None for a leaf."""
    if isinstance(value, Tensor) or is_block_mask(value):
        return None
    children, tree = tree_flatten(value, is_leaf=lambda inner: inner is not value)
    if tree.is_leaf():
        return None
    keyed = isinstance(value, Mapping) and len(value) == len(children)
    return dict(zip(value if keyed else range(len(children)), children, strict=True))


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a value; torch may have registered BlockMask as a container, here it is one."""
    return tree_flatten(value, is_leaf=is_block_mask)


def describe(value: Any) -> str:
    """A tensor by its type and shape, a container by its keys, anything else by its type."""
    if isinstance(value, Tensor):
        layout = f" {value.placements}" if is_sharded(value) else ""
        return f"{TensorMeta(tuple(value.shape), value.dtype)}{layout}"
    if is_block_mask(value):
        return f"BlockMask{list(value.shape)}"
    held = children(value)
    if held is not None:
        return f"a {type(value).__name__} of {list(held)}"
    simple = value is None or isinstance(value, int | float | str)
    return repr(value) if simple else f"a {type(value).__name__}"


# If FlexAttention was never imported, no value can be a BlockMask.
def is_block_mask(value: object) -> TypeGuard[BlockMask]:
    """Whether a value is a mask of FlexAttention."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return isinstance(value, getattr(module, "BlockMask", ()))


def bounds(rows: int, chunks: int) -> list[int]:
    """Where each piece begins, and where the last one ends; the larger pieces come first.

    >>> bounds(5, 3)
    [0, 2, 4, 5]
    """
    least, larger = divmod(rows, chunks)
    return [chunk * least + min(chunk, larger) for chunk in range(chunks + 1)]


def cut(name: str, value: Any, dim: int | None, chunks: int, each: int = 1) -> Sequence[Any]:
    """The pieces of a leaf, as views; ``each`` entries that follow one another stay together."""
    if dim is None:
        return [value] * chunks
    if type(value) is not Tensor and is_block_mask(value):
        return _cut_block_mask(value, chunks)
    if is_sharded(value):
        # Each rank cuts its own part: cutting the whole would first gather it on all of them.
        _require_even(name, value, dim, chunks)
        local = _pieces(value.to_local(), dim, chunks, each)
        pieces = [_like(value, piece, dim, value.stride()) for piece in local]
    else:
        pieces = _pieces(value, dim, chunks, each)
    if value.requires_grad and value.is_leaf:
        # A view of a leaf is none itself: it would not keep the gradient that a stage reads.
        for piece in pieces:
            piece.retain_grad()
    return pieces


def _pieces(tensor: Tensor, dim: int, chunks: int, each: int) -> Sequence[Tensor]:
    if each == 1:
        return tensor.tensor_split(chunks, dim)
    inner = bounds(tensor.shape[dim] // each, chunks)[1:-1]
    return tensor.tensor_split([each * bound for bound in inner], dim)


def _cut_block_mask(mask: BlockMask, chunks: int) -> list[BlockMask]:
    """Masks for the parts of a batch, as views: each tensor in a mask has the batch in front."""

    def part(start: int, stop: int) -> BlockMask:
        piece = copy.copy(mask)
        for attribute, value in vars(mask).items():
            if isinstance(value, Tensor) and value.shape[0] == mask.shape[0]:
                setattr(piece, attribute, value[start:stop])
        # The function counts samples from the start of the batch, attention from that of the part.
        piece.mask_mod = lambda b, h, q, kv: mask.mask_mod(b + start, h, q, kv)
        return piece

    return [part(*pair) for pair in itertools.pairwise(bounds(mask.shape[0], chunks))]


def _shards(value: DTensor, dim: int) -> int:
    """Into how many parts the ranks divide a dimension."""
    mesh = value.device_mesh
    return math.prod(mesh.size(i) for i, p in enumerate(value.placements) if p.is_shard(dim))


def _require_even(name: str, value: DTensor, dim: int, least: int) -> None:
    """Raise if shards differ in size: parts of them would not lie where a layout has them."""
    shards = _shards(value, dim)
    if value.shape[dim] % shards or value.shape[dim] < shards * least:
        raise BatchError(
            f"{name} is {describe(value)}: {value.shape[dim]} along dimension {dim} must divide "
            f"evenly among its {counted(shards, 'shard')}, with at least {least} in each"
        )


def _like(
    value: DTensor, local: Tensor, dim: int, stride: tuple[int, ...] | None = None
) -> DTensor:
    """A tensor laid out like another, but as long along one dimension as this rank's part tells."""
    shape = list(value.shape)
    shape[dim] = local.shape[dim] * _shards(value, dim)
    return type(value).from_local(
        local,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride or torch.empty(shape, device="meta").stride(),
    )


def same(one: Any, other: Any) -> bool:
    """Whether two micro-batches gave the same; tensors are compared whole."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or torch.equal(one, other)
    return one is other or bool(one == other)


def join(name: str, values: Sequence[Any], dim: int) -> Tensor:
    """Tensors one after the other; scalars become a vector, as there is nothing to join along."""
    first = values[0]

    def fixed(value: Any) -> tuple[object, ...]:
        """All that must be the same in each: the kind, the other dimensions, the layout."""
        if not isinstance(value, Tensor):
            return ()
        layout = value.placements if is_sharded(value) else None
        return value.ndim, value.shape[:dim], value.shape[dim + 1 :], layout

    for number, value in enumerate(values):
        if fixed(value) != fixed(first):
            raise BatchError(
                f"{name} is {describe(first)} in micro-batch 0, but {describe(value)} in "
                f"micro-batch {number}: these cannot be joined along dimension {dim}"
            )
    if not first.ndim:
        return torch.stack(list(values))
    if not is_sharded(first):
        return torch.cat(list(values), dim)
    for value in values:
        _require_even(name, value, dim, 0)
    return _like(first, torch.cat([value.to_local() for value in values], dim), dim)
