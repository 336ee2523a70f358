"""Cut a batch into micro-batches, and merge what came out of them, as torch does.

A batch too small for the micro-batches that are asked for is cut into fewer, where Taktline's own
functions raise; and chunk specs are matched with values by position, not by name.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from taktline.errors import BatchError, InvalidBatchError
from taktline.runtime.leaves import cut, flatten, is_block_mask
from taktline.runtime.microbatch import (
    TensorChunkSpec,
    _CustomReducer,
    _LossReducer,
    _Replicate,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "TensorChunkSpec",
    "_CustomReducer",
    "_LossReducer",
    "_Replicate",
    "_split_block_mask",
    "_split_tensor",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
    "sum_reducer",
]

logger = logging.getLogger("torch.distributed.pipelining.microbatch")

DEFAULT_CHUNK_DIM = 0

# Whether each micro-batch is as large as the batch, with zeros in place of all others, so that a
# model that mixes the samples of a batch can be checked.
_debug_mask_minibatches = False

sum_reducer = _LossReducer(torch.tensor(0.0), torch.add)


def _split_tensor(
    tensor: torch.Tensor, spec: TensorChunkSpec, num_chunks: int
) -> Sequence[torch.Tensor]:
    """The pieces of a tensor, as views.

    >>> _split_tensor(torch.arange(3), TensorChunkSpec(0), 2)
    (tensor([0, 1]), tensor([2]))
    """
    if not isinstance(tensor, torch.Tensor):
        raise BatchError(f"only a tensor can be cut into micro-batches, not {tensor!r}")
    size = tensor.size(spec.split_dim)
    if size < num_chunks:
        raise InvalidBatchError(f"Tensor size {size} is smaller than num_chunks")
    pieces = cut("tensor", tensor, spec.split_dim, num_chunks)
    if not _debug_mask_minibatches:
        return pieces
    masked: list[torch.Tensor] = []
    start = 0
    for piece in pieces:
        length = piece.size(spec.split_dim)
        whole = torch.zeros_like(tensor)
        whole.narrow(spec.split_dim, start, length).copy_(piece)
        masked.append(whole)
        start += length
    return masked


def _split_block_mask(block_mask: BlockMask, num_chunks: int) -> list[BlockMask]:
    """The masks of the parts of a batch; one for a batch of 1 holds for all of them."""
    size = block_mask.kv_num_blocks.size(0)
    if size == 1:
        return [block_mask] * num_chunks
    if size < num_chunks:
        raise InvalidBatchError("Block mask has fewer batch size than the number of chunks. ")
    return list(cut("mask", block_mask, 0, num_chunks))


def _split_leaf(value: Any, spec: Any, chunks: int) -> Sequence[Any]:
    """The pieces of one value by its spec."""
    if spec is _Replicate or isinstance(spec, _Replicate):
        return [value] * chunks
    if isinstance(value, torch.Tensor) or is_block_mask(value):
        if not isinstance(spec, TensorChunkSpec):
            raise InvalidBatchError(f"Expected TensorChunkSpec, got {type(spec)}")
        if isinstance(value, torch.Tensor):
            return _split_tensor(value, spec, chunks)
        if spec.split_dim != 0:
            raise InvalidBatchError("BlockMask only supports split_dim=0")
        return _split_block_mask(value, chunks)
    raise BatchError(f"Unsupported chunk spec: {spec} and value: {value} combination.")


def _size_of(value: Any, spec: Any) -> int | None:
    """Into how many pieces a value can be cut; None if that does not matter."""
    if isinstance(spec, TensorChunkSpec):
        if isinstance(value, torch.Tensor):
            return value.size(spec.split_dim)
        if is_block_mask(value) and value.kv_num_blocks.size(0) > 1:
            return value.kv_num_blocks.size(0)
    return None


def _pairs(values: Mapping[Any, Any], specs: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Each leaf with its spec, by position."""
    if len(values) != len(specs):
        raise InvalidBatchError(
            f"args_dict.keys() = {list(values)} args_chunk_spec.keys() = {list(specs)}"
        )
    leaves, found = flatten(dict(values))[0], tree_flatten(dict(specs))[0]
    if len(leaves) != len(found):
        raise BatchError(f"there are {len(leaves)} values to be cut, but {len(found)} chunk specs")
    return list(zip(leaves, found, strict=True))


def _chunks_for(pairs: Sequence[tuple[Any, Any]], chunks: int) -> int:
    """So many as asked for, or as the smallest value gives."""
    sizes = [size for pair in pairs if (size := _size_of(*pair)) is not None]
    return min([chunks, *sizes])


def _shard_dict_of_args(
    args_dict: Mapping[Any, Any], args_chunk_spec: Mapping[Any, Any], num_chunks: int
) -> list[dict[Any, Any]]:
    """The arguments of each micro-batch.

    >>> _shard_dict_of_args({"x": torch.arange(2)}, {"x": TensorChunkSpec(0)}, 2)
    [{'x': tensor([0])}, {'x': tensor([1])}]
    """
    pairs = _pairs(args_dict, args_chunk_spec)
    chunks = _chunks_for(pairs, num_chunks)
    pieces = [_split_leaf(value, spec, chunks) for value, spec in pairs]
    tree = flatten(dict(args_dict))[1]
    return [tree_unflatten([piece[chunk] for piece in pieces], tree) for chunk in range(chunks)]


def _default_spec(values: Any) -> Any:
    """Cut what can be cut along dimension 0."""

    def spec(value: Any) -> Any:
        can_be_cut = isinstance(value, torch.Tensor) or is_block_mask(value)
        return TensorChunkSpec(DEFAULT_CHUNK_DIM) if can_be_cut else _Replicate()

    return tree_map(spec, values, is_leaf=is_block_mask)


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
    kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
) -> tuple[list[tuple], list[dict]]:
    """The arguments of each micro-batch, of which there may be fewer than asked for.

    >>> split_args_kwargs_into_chunks((torch.arange(2),), {"causal": True}, 4)
    ([(tensor([0]),), (tensor([1]),)], [{'causal': True}, {'causal': True}])
    """
    kwargs = kwargs or {}
    values = dict(enumerate(args))
    if args_chunk_spec is None:
        args_chunk_spec = _default_spec(args)
    if kwargs_chunk_spec is None:
        kwargs_chunk_spec = _default_spec(kwargs)
    specs = dict(enumerate(args_chunk_spec or ()))
    pairs = _pairs(values, specs) + _pairs(kwargs, kwargs_chunk_spec or {})
    chunks = _chunks_for(pairs, chunks)
    positional = _shard_dict_of_args(values, specs, chunks)
    named = _shard_dict_of_args(kwargs, kwargs_chunk_spec or {}, chunks)
    return [tuple(chunk[place] for place in values) for chunk in positional], named


def merge_chunks(chunks: list[Any], chunk_spec: Any) -> Any:
    """One output from those of the micro-batches, in the structure of the spec.

    >>> merge_chunks([(torch.tensor([1]), 7), (torch.tensor([2]), 7)], (TensorChunkSpec(0), None))
    (tensor([1, 2]), 7)
    """
    if chunk_spec is None:
        leaves, tree = flatten(chunks[0])
        specs: list[Any] = [TensorChunkSpec(DEFAULT_CHUNK_DIM)] * len(leaves)
    else:
        specs, tree = tree_flatten(chunk_spec)
    rows = [flatten(chunk)[0] for chunk in chunks]
    for chunk, row in zip(chunks, rows, strict=True):
        if len(row) != len(specs):
            raise BatchError(f"Chunk {chunk} did not match chunk spec {chunk_spec}")
    merged = [_merge([row[place] for row in rows], spec) for place, spec in enumerate(specs)]
    return tree_unflatten(merged, tree)


def _merge(values: list[Any], spec: Any) -> Any:
    """One leaf from those of the micro-batches."""
    if isinstance(spec, _CustomReducer):
        return functools.reduce(spec.reduce_fn, values, spec.init_value)
    if isinstance(spec, TensorChunkSpec):
        if _debug_mask_minibatches:
            values = _unmasked(values, spec.split_dim)
        return torch.cat(values, dim=spec.split_dim)
    for value in values[1:]:
        if not values[0] == value:
            raise InvalidBatchError(f"Expected {values[0]}, got {value}")
    return values[0]


def _unmasked(values: Sequence[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """Of each micro-batch its own part, without the zeros around it."""
    for value in values[1:]:
        if value.shape != values[0].shape:
            raise InvalidBatchError(f"Expected shape {values[0].shape}, got {value.shape}")
    columns = zip(*[value.tensor_split(len(values), dim) for value in values], strict=True)
    return [column[chunk] for chunk, column in enumerate(columns)]
