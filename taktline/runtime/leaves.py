"""Describes, cuts and joins the leaves of arguments: tensors, DTensors, and block masks."""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from taktline.checks import with_article
from taktline.errors import BatchError
from taktline.meta import TensorMeta
from taktline.pytree import TreeSpec, tree_flatten
from taktline.sharding import is_sharded
from taktline.text import counted

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.nn.attention.flex_attention import BlockMask


def children(value: Any) -> dict[Any, Any] | None:
    """The values in a container, by key or position; None for a leaf."""
    if isinstance(value, Tensor) or is_block_mask(value):
        return None
    children, tree = tree_flatten(value, is_leaf=lambda inner: inner is not value)
    if tree.is_leaf():
        return None
    keyed = isinstance(value, Mapping) and len(value) == len(children)
    return dict(zip(value if keyed else range(len(children)), children, strict=True))


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a value; a BlockMask is a leaf, though torch may have registered it."""
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
        return f"{with_article(type(value).__name__)} of {list(held)}"
    simple = value is None or isinstance(value, int | float | str)
    return repr(value) if simple else with_article(type(value).__name__)


# If FlexAttention was never imported, no value can be a BlockMask.
def is_block_mask(value: object) -> TypeGuard[BlockMask]:
    """Whether a value is a mask of FlexAttention."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return isinstance(value, getattr(module, "BlockMask", ()))


def bounds(rows: int, chunks: int) -> list[int]:
    """The beginning of each part, and the end of the last; larger parts come first.

    >>> bounds(5, 3)
    [0, 2, 4, 5]
    """
    least, larger = divmod(rows, chunks)
    return [chunk * least + min(chunk, larger) for chunk in range(chunks + 1)]


def cut(name: str, value: Any, dim: int | None, chunks: int, each: int = 1) -> Sequence[Any]:
    """The parts of a leaf, as views; groups of ``each`` entries stay together."""
    if dim is None:
        return [value] * chunks
    if type(value) is not Tensor and is_block_mask(value):
        return _cut_block_mask(value, chunks)
    if is_sharded(value):
        # Each rank cuts its own shard: to cut the whole would gather it first.
        _require_even(name, value, dim, chunks)
        local = _parts(value.to_local(), dim, chunks, each)
        parts = [_like(value, part, dim, value.stride()) for part in local]
    else:
        parts = _parts(value, dim, chunks, each)
    if value.requires_grad and value.is_leaf:
        # A view is no leaf of autograd: it would not keep the gradient that a stage reads.
        for part in parts:
            part.retain_grad()
    return parts


def _parts(tensor: Tensor, dim: int, chunks: int, each: int) -> Sequence[Tensor]:
    if each == 1:
        return tensor.tensor_split(chunks, dim)
    inner = bounds(tensor.shape[dim] // each, chunks)[1:-1]
    return tensor.tensor_split([each * bound for bound in inner], dim)


def _cut_block_mask(mask: BlockMask, chunks: int) -> list[BlockMask]:
    """Masks for the parts of a batch, as views: the batch is dimension 0 of all their tensors."""

    def part(start: int, stop: int) -> BlockMask:
        cut = copy.copy(mask)
        for attribute, value in vars(mask).items():
            if isinstance(value, Tensor) and value.shape[0] == mask.shape[0]:
                setattr(cut, attribute, value[start:stop])
        # The function counts samples from the start of the batch, attention from that of its part.
        cut.mask_mod = lambda b, h, q, kv: mask.mask_mod(b + start, h, q, kv)
        return cut

    return [part(*pair) for pair in itertools.pairwise(bounds(mask.shape[0], chunks))]


def _shards(value: DTensor, dim: int) -> int:
    """The number of shards of a dimension."""
    mesh = value.device_mesh
    return math.prod(mesh.size(i) for i, p in enumerate(value.placements) if p.is_shard(dim))


def _require_even(name: str, value: DTensor, dim: int, least: int) -> None:
    """Raise if shards differ in size: their parts would not lie where a layout has them."""
    shards = _shards(value, dim)
    if value.shape[dim] % shards or value.shape[dim] < shards * least:
        raise BatchError(
            f"{name} is {describe(value)}: {value.shape[dim]} along dimension {dim} must divide "
            f"evenly among its {counted(shards, 'shard')}, with at least {least} in each"
        )


def _like(
    value: DTensor, local: Tensor, dim: int, stride: tuple[int, ...] | None = None
) -> DTensor:
    """A tensor laid out like another, with a length along ``dim`` that follows from this shard."""
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
    """Whether the outputs of two micro-batches are the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or torch.equal(one, other)
    return one is other or bool(one == other)


def join(name: str, values: Sequence[Any], dim: int) -> Tensor:
    """Concatenate tensors; scalars become a vector."""
    first = values[0]

    def fixed(value: Any) -> tuple[object, ...]:
        """The properties that all must share: the kind, the other dimensions, the layout."""
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
