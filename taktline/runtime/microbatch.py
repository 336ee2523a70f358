"""Cuts a batch into micro-batches, and merges their outputs.

A tensor is cut along dimension 0, anything else goes whole to every micro-batch. A chunk spec
changes that. It has the structure of the arguments; one spec for a container holds for all values
in it, and None is the default.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from taktline.checks import require_instance, require_whole, with_article
from taktline.errors import BatchError
from taktline.meta import TensorMeta
from taktline.pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten
from taktline.sharding import is_sharded
from taktline.text import counted

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, repr=False)
class TensorChunkSpec:
    """Cut a tensor along this dimension, or join it along this one.

    >>> split_value(torch.arange(6).view(2, 3), 3, spec=TensorChunkSpec(1), name="x")[0].tolist()
    [[0], [3]]
    """

    split_dim: int

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{self}"

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[Any, ...]) -> tuple[Any, ...]:
        """Specs for positional arguments, from their dimensions."""
        return tree_map(TensorChunkSpec, chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: dict[str, Any]) -> dict[str, Any]:
        """Specs for keyword arguments, from their dimensions.

        >>> str(TensorChunkSpec.from_dict({"mask": 1})["mask"])
        'TensorChunkSpec(1)'
        """
        return tree_map(TensorChunkSpec, chunk_dims)


class Replicate:
    """Pass the whole value to every micro-batch; the class itself works as an instance.

    >>> split_value(torch.zeros(1), 2, spec=Replicate(), name="scale")
    [tensor([0.]), tensor([0.])]
    """


_Replicate = Replicate  # torch's name


class _CustomReducer:
    """Merge the values of the micro-batches by a function of two, from an initial value."""

    def __init__(self, init_value: Any, reduce_fn: Callable[[Any, Any], Any]) -> None:
        self.init_value = init_value
        self.reduce_fn = reduce_fn


class _LossReducer(_CustomReducer):
    """A reducer for losses."""


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: dict[str, Any] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """The arguments of each micro-batch, as views of those of the batch.

    >>> split_args_kwargs_into_chunks((torch.arange(5), "x"), {"causal": True}, 2)
    ([(tensor([0, 1, 2]), 'x'), (tensor([3, 4]), 'x')], [{'causal': True}, {'causal': True}])
    """
    require_instance("args", args, (tuple, list), "a tuple", BatchError)
    if kwargs is not None:
        require_instance("kwargs", kwargs, dict, error=BatchError)
    arguments = _arguments(args, kwargs, args_chunk_spec, kwargs_chunk_spec)
    _require_enough(arguments, chunks)
    cut = [argument.cut(chunks) for argument in arguments]
    # From one list per argument to one tuple per micro-batch; zip() of nothing is empty.
    positional = list(zip(*cut[: len(args)], strict=True)) if args else [()] * chunks
    if not kwargs:
        return positional, [{} for _ in range(chunks)]
    named = zip(*cut[len(args) :], strict=True)
    return positional, [dict(zip(kwargs, values, strict=True)) for values in named]


def split_value(
    value: Any, chunks: int, *, spec: Any = None, name: str, each: int = 1
) -> list[Any]:
    """The parts of one value, called ``name`` in errors; groups of ``each`` entries stay together.

    >>> split_value(torch.arange(3), 4, name="target")
    Traceback (most recent call last):
    taktline.errors.BatchError: target is int64[3]: 3 along dimension 0 cannot be cut into 4 ...
    >>> [part.tolist() for part in split_value(torch.arange(6), 2, name="target", each=2)]
    [[0, 1, 2, 3], [4, 5]]
    """
    argument = _argument(name, value, spec)
    _require_enough([argument], chunks)
    return list(argument.cut(chunks, each))


def size_of(value: Any, *, spec: Any = None, name: str) -> int:
    """The size of one value along the dimensions of its cuts; 0 if it is not cut."""
    first = _first_cut([_argument(name, value, spec)])
    return 0 if first is None else first.size


def batch_size_of(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: dict[str, Any] | None = None,
) -> int | None:
    """The size that all arguments share along the dimensions of their cuts; None if none is cut."""
    first = _first_cut(_arguments(args, kwargs, args_chunk_spec, kwargs_chunk_spec))
    return None if first is None else first.size


def merge_chunks(chunks: list[Any], chunk_spec: Any) -> Any:
    """Merge the outputs of the micro-batches, in their structure; scalars become a vector.

    >>> merge_chunks([(torch.tensor([1, 2]), "x"), (torch.tensor([3]), "x")], None)
    (tensor([1, 2, 3]), 'x')
    """
    require_instance("chunks", chunks, (list, tuple), "a list", BatchError)
    if not chunks:
        raise BatchError("there is no micro-batch to merge")
    (leaves, tree), *others = [flatten(chunk) for chunk in chunks]
    for number, (_, other) in enumerate(others, 1):
        if other != tree:
            shown = " ".join(f"{tree}, but micro-batch {number} has {other}".split())
            raise BatchError(f"micro-batch 0 has the structure {shown}")
    columns = zip(leaves, *[leaves for leaves, _ in others], strict=True)
    walk = _walk("output", chunks[0], chunk_spec)
    merged = [
        _merge(name, values, spec) for (name, _, spec), values in zip(walk, columns, strict=True)
    ]
    return tree_unflatten(merged, tree)


class _Leaf(NamedTuple):
    """A tensor or another value, and the dimension of its cuts; None: it is not cut."""

    name: str
    value: Any
    dim: int | None
    by_default: bool = True

    @property
    def size(self) -> int:
        return self.value.shape[self.dim]

    def __str__(self) -> str:
        return f"{self.name} is {describe(self.value)}: {self.size} along dimension {self.dim}"


class _Argument(NamedTuple):
    """The leaves of a value to be cut; a value that is a leaf itself has no tree."""

    leaves: list[_Leaf]
    tree: TreeSpec | None

    def cut(self, chunks: int, each: int = 1) -> Sequence[Any]:
        """The part of each micro-batch."""
        parts = [cut(name, value, dim, chunks, each) for name, value, dim, _ in self.leaves]
        if self.tree is None:
            return parts[0]
        return [tree_unflatten([p[chunk] for p in parts], self.tree) for chunk in range(chunks)]


def _argument(name: str, value: Any, spec: Any) -> _Argument:
    """A value with its spec; raises if the spec does not fit."""
    if spec is None and type(value) is torch.Tensor:  # the usual case, without the pytree
        return _Argument([_Leaf(name, value, 0 if value.ndim else None)], None)
    leaves = [
        _Leaf(name, leaf, _cut_dim(name, leaf, spec), spec is None)
        for name, leaf, spec in _walk(name, value, spec)
    ]
    tree = flatten(value)[1]
    return _Argument(leaves, None if tree.is_leaf() else tree)


def _arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None, args_spec: Any, kwargs_spec: Any
) -> list[_Argument]:
    """All arguments with their specs; specs for no arguments are ignored."""
    if args_spec is None or not args:
        args_spec = [None] * len(args)
    elif not isinstance(args_spec, tuple | list) or len(args_spec) != len(args):
        raise BatchError(
            f"the chunk spec of {counted(len(args), 'positional argument')} must be a tuple with "
            f"one entry for each, not {describe(args_spec)}"
        )
    found = [_argument(f"argument {i}", args[i], spec) for i, spec in enumerate(args_spec)]
    if not kwargs:
        return found
    if kwargs_spec is None:
        kwargs_spec = dict.fromkeys(kwargs)
    elif not isinstance(kwargs_spec, Mapping) or kwargs_spec.keys() != kwargs.keys():
        raise BatchError(
            f"the chunk spec of the keyword arguments {list(kwargs)} must be a dict with one entry "
            f"for each, not {describe(kwargs_spec)}"
        )
    for key, value in kwargs.items():
        found.append(_argument(f"keyword argument {key!r}", value, kwargs_spec[key]))
    return found


def _first_cut(arguments: list[_Argument]) -> _Leaf | None:
    """The first leaf that is cut; raises if another one has another size."""
    cut = [leaf for argument in arguments for leaf in argument.leaves if leaf.dim is not None]
    for leaf in cut[1:]:
        if leaf.size != cut[0].size:
            hint = (
                "; where dimension 0 is not the batch, pass a chunk spec: TensorChunkSpec(dim), or "
                "Replicate() for the whole in each micro-batch"
            )
            fitting = _fitting(leaf, cut[0].size) or _fitting(cut[0], leaf.size)
            by_default = leaf.by_default or cut[0].by_default
            raise BatchError(
                f"not one batch: {cut[0]}, but {leaf}{hint + fitting if by_default else ''}"
            )
    return cut[0] if cut else None


def _fitting(leaf: _Leaf, size: int) -> str:
    """The chunk spec that would make a leaf part of a batch of a size, in words."""
    dims = [dim for dim, length in enumerate(leaf.value.shape) if dim and length == size]
    if not leaf.by_default or len(dims) != 1:
        return ""
    return f"; here TensorChunkSpec({dims[0]}) would fit {leaf.name}"


def _require_enough(arguments: list[_Argument], chunks: int) -> None:
    """Raise unless there is a row for each micro-batch."""
    require_whole("micro-batches", chunks, least=1, error=BatchError)
    first = _first_cut(arguments)
    if first is not None and not first.size:
        raise BatchError(f"{first}: it is empty; leave out batches without rows")
    if first is not None and first.size < chunks:
        raise BatchError(
            f"{first} cannot be cut into {counted(chunks, 'micro-batch')}; pass at least "
            f"{chunks}, or use at most {counted(first.size, 'micro-batch')}"
        )


def _walk(name: str, value: Any, spec: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each leaf of a value, with its name and its spec."""
    values, specs = children(value), None
    kinds = TensorChunkSpec | Replicate | _CustomReducer
    if spec is not None and spec is not Replicate and not isinstance(spec, kinds):
        specs = children(spec)
        if specs is None:
            raise BatchError(
                f"{name}: {spec!r} is not a chunk spec; use a TensorChunkSpec, Replicate() or None"
            )
        if values is None or specs.keys() != values.keys():
            raise BatchError(f"{name} is {describe(value)}, but its chunk spec {describe(spec)}")
    if values is None:
        yield name, value, spec
        return
    for key, inner in values.items():
        yield from _walk(f"{name}[{key!r}]", inner, spec if specs is None else specs[key])


def _cut_dim(name: str, leaf: Any, spec: Any) -> int | None:
    """The dimension of a leaf's cuts; None if it goes whole to each micro-batch."""
    if spec is Replicate or isinstance(spec, Replicate):
        return None
    if isinstance(spec, _CustomReducer):
        raise BatchError(f"{name} has a reducer as its chunk spec, but reducers only merge")
    if isinstance(leaf, torch.Tensor):
        return None if spec is None and not leaf.ndim else _dimension(name, leaf, spec)
    if is_block_mask(leaf):
        if spec is not None and spec.split_dim != 0:
            raise BatchError(f"{name} is a BlockMask, which is cut along dimension 0, not {spec}")
        return 0 if leaf.shape[0] > 1 else None  # a mask for one sample holds for all
    if spec is not None:
        raise BatchError(f"{name} is {describe(leaf)}, no tensor: use Replicate(), not {spec}")
    return None


def _dimension(name: str, value: torch.Tensor, spec: TensorChunkSpec | None) -> int:
    """The dimension of a spec, counted from the front."""
    dim = spec.split_dim if spec else 0
    if not isinstance(dim, int) or not -value.ndim <= dim < value.ndim:
        fits = f"one from {-value.ndim} to {value.ndim - 1}" if value.ndim else "Replicate()"
        raise BatchError(f"{name} is {describe(value)}: it has no dimension {dim!r}; use {fits}")
    return dim % value.ndim


def _merge(name: str, values: Sequence[Any], spec: Any) -> Any:
    """Merge the leaves of the micro-batches."""
    first = values[0]
    if isinstance(spec, _CustomReducer):
        return functools.reduce(spec.reduce_fn, values, spec.init_value)
    if isinstance(first, torch.Tensor) and (spec is None or isinstance(spec, TensorChunkSpec)):
        return join(name, values, _dimension(name, first, spec) if first.ndim else 0)
    if isinstance(spec, TensorChunkSpec):
        raise BatchError(f"{name} is {describe(first)}, no tensor: use Replicate(), not {spec}")
    for number, value in enumerate(values[1:], 1):
        if not same(first, value):
            one, other = describe(first), describe(value)
            raise BatchError(
                f"{name} is {one} in micro-batch 0, but {other if other != one else 'another one'} "
                f"in micro-batch {number}; use a _CustomReducer as its chunk spec"
            )
    return first


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
