"""Batches: cut into micro-batches, passed to a call, fed to a step, and merged again.

A tensor is cut along dimension 0, anything else goes whole to every micro-batch. A chunk spec
changes that. It has the structure of the arguments; one spec for a container holds for all values
in it, and None is the default.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch

from taktline import pytree
from taktline.checks import check, with_article
from taktline.errors import BatchError, MismatchError, text_of
from taktline.meta import TensorMeta, is_sharded
from taktline.text import counted


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
        return pytree.tree_map(TensorChunkSpec, chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: dict[str, Any]) -> dict[str, Any]:
        """Specs for keyword arguments, from their dimensions.

        >>> str(TensorChunkSpec.from_dict({"mask": 1})["mask"])
        'TensorChunkSpec(1)'
        """
        return pytree.tree_map(TensorChunkSpec, chunk_dims)


class Replicate:
    """Pass the whole value to every micro-batch; the class itself works as an instance.

    >>> split_value(torch.zeros(1), 2, spec=Replicate(), name="scale")
    [tensor([0.]), tensor([0.])]
    """


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
    check("args", args, (tuple, list), "a tuple", error=BatchError)
    kwargs = check("kwargs", {} if kwargs is None else kwargs, dict, error=BatchError)
    check("micro-batches", chunks, int, least=1, error=BatchError)
    specs = args_chunk_spec, kwargs_chunk_spec
    return _cut(args, kwargs, specs, lambda rows: chunks)[1:]


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
    return list(_Cuts([(name, value, spec)]).into(chunks, each)[0])


def merge_chunks(chunks: list[Any], chunk_spec: Any) -> Any:
    """Merge the outputs of the micro-batches, in their structure; scalars become a vector.

    >>> merge_chunks([(torch.tensor([1, 2]), "x"), (torch.tensor([3]), "x")], None)
    (tensor([1, 2, 3]), 'x')
    """
    check("chunks", chunks, (list, tuple), "a list", error=BatchError)
    if not chunks:
        raise BatchError("there is no micro-batch to merge")
    (leaves, tree), *others = [_flatten(chunk) for chunk in chunks]
    for number, (_, other) in enumerate(others, 1):
        if other != tree:
            shown = " ".join(f"{tree}, but micro-batch {number} has {other}".split())
            raise BatchError(f"micro-batch 0 has the structure {shown}")
    columns = zip(leaves, *[leaves for leaves, _ in others], strict=True)
    places = zip(_walk("output", chunks[0], chunk_spec), columns, strict=True)
    merged = [_merged(name, values, spec) for (name, _, spec), values in places]
    return pytree.tree_unflatten(merged, tree)


def bounds(rows: int, chunks: int) -> list[int]:
    """The beginning of each part, and the end of the last; larger parts come first.

    >>> bounds(5, 3)
    [0, 2, 4, 5]
    """
    least, larger = divmod(rows, chunks)
    return [chunk * least + min(chunk, larger) for chunk in range(chunks + 1)]


def describe(value: Any) -> str:
    """A tensor by its type and shape, a container by its keys, anything else by its type."""
    if isinstance(value, torch.Tensor):
        layout = f" {value.placements}" if is_sharded(value) else ""
        return f"{TensorMeta(tuple(value.shape), value.dtype)}{layout}"
    if (held := _children(value)) is not None:
        return f"{with_article(type(value).__name__)} of {list(held)}"
    simple = value is None or isinstance(value, int | float | str)
    return repr(value) if simple else with_article(type(value).__name__)


class _Leaf(NamedTuple):
    """A tensor or another value, and the dimension of its cuts; None: it is not cut."""

    name: str
    value: Any
    dim: int | None

    @property
    def size(self) -> int:
        return self.value.shape[self.dim]

    def cut(self, chunks: int, each: int) -> Sequence[Any]:
        """The part of each micro-batch, as views; groups of ``each`` entries stay together."""
        if self.dim is None:
            return [self.value] * chunks
        if _is_block_mask(self.value):
            return _cut_block_mask(self.value, chunks)
        places = [each * bound for bound in bounds(self.size // each, chunks)[1:-1]]
        parts = self.value.tensor_split(places, self.dim)
        if self.value.requires_grad and self.value.is_leaf:
            # A view is no leaf of autograd: it would not keep the gradient that a stage reads.
            for part in parts:
                part.retain_grad()
        return parts

    def __str__(self) -> str:
        return f"{self.name} is {describe(self.value)}: {self.size} along dimension {self.dim}"


class _Cuts:
    """Where some values are cut."""

    def __init__(self, values: Iterable[tuple[str, Any, Any]]) -> None:
        """For each value its name in errors, and its spec; raises if they are not one batch."""
        self._values = [
            (value, [_Leaf(at, x, _cut_dim(at, x, s)) for at, x, s in _walk(name, value, spec)])
            for name, value, spec in values
        ]
        cut = [leaf for _, leaves in self._values for leaf in leaves if leaf.dim is not None]
        self._first = cut[0] if cut else None
        self.rows = cut[0].size if cut else 0
        """The size of all that is cut; 0 if nothing is."""
        for leaf in cut[1:]:
            if leaf.size != self.rows:
                raise BatchError(
                    f"not one batch: {cut[0]}, but {leaf}; where dimension 0 is not the batch, "
                    "pass a chunk spec: TensorChunkSpec(dim), or Replicate() for the whole in each "
                    "micro-batch"
                )

    def into(self, chunks: int, each: int = 1) -> list[Sequence[Any]]:
        """The parts of each value; raises unless there is a row for each micro-batch."""
        if self._first is not None and not self.rows:
            raise BatchError(f"{self._first}: it is empty; leave out batches without rows")
        if self._first is not None and self.rows < chunks:
            raise BatchError(
                f"{self._first} cannot be cut into {counted(chunks, 'micro-batch')}; pass at least "
                f"{chunks}, or use at most {counted(self.rows, 'micro-batch')}"
            )
        return [_parts(value, leaves, chunks, each) for value, leaves in self._values]


def _parts(value: Any, leaves: Sequence[_Leaf], chunks: int, each: int) -> Sequence[Any]:
    """The part of each micro-batch."""
    parts = [leaf.cut(chunks, each) for leaf in leaves]
    if len(leaves) == 1 and leaves[0].value is value:
        return parts[0]
    tree = _flatten(value)[1]
    return [pytree.tree_unflatten([part[i] for part in parts], tree) for i in range(chunks)]


def _cut(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    specs: tuple[Any, Any],
    parts_of: Callable[[int], int],
) -> tuple[int, list[tuple[Any, ...]], list[dict[str, Any]]]:
    """The rows of a batch, 0 if unknown, and the arguments of each micro-batch.

    Specs for no arguments are ignored; ``parts_of`` says how many parts so many rows have.
    """
    by_place = _specs("args", args, dict(enumerate(args)), specs[0]) if args else {}
    by_name = _specs("kwargs", kwargs, kwargs, specs[1]) if kwargs else {}
    places = [(f"argument {i}", args[i], spec) for i, spec in by_place.items()]
    named = [(f"keyword argument {k!r}", value, by_name[k]) for k, value in kwargs.items()]
    cuts = _Cuts([*places, *named])
    cut, count = cuts.into(parts := parts_of(cuts.rows)), len(args)
    found = [tuple(each[i] for each in cut) for i in range(parts)]
    keywords = [dict(zip(kwargs, part[count:], strict=True)) for part in found]
    return cuts.rows, [part[:count] for part in found], keywords


def _walk(name: str, value: Any, spec: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each leaf of a value, with its name and its spec."""
    inner = _children(value)
    specs = _specs(name, value, inner, spec)
    if inner is None:
        yield name, value, spec
    else:
        for key, each in inner.items():
            yield from _walk(f"{name}[{key!r}]", each, specs[key])


def _specs(name: str, value: Any, inner: Mapping[Any, Any] | None, spec: Any) -> dict[Any, Any]:
    """The specs of the values in a container; raises if the spec of the container does not fit."""
    if spec is None or _is_whole(spec) or isinstance(spec, TensorChunkSpec):
        return dict.fromkeys(inner or (), spec)
    specs = _children(spec)
    if specs is None:
        raise BatchError(
            f"{name}: {spec!r} is not a chunk spec; use a TensorChunkSpec, Replicate() or None"
        )
    if inner is None or specs.keys() != inner.keys():
        raise BatchError(f"{name} is {describe(value)}, but its chunk spec {describe(spec)}")
    return specs


def _cut_dim(name: str, leaf: Any, spec: Any) -> int | None:
    """The dimension of a leaf's cuts; None if it goes whole to each micro-batch."""
    if _is_whole(spec):
        return None
    if isinstance(leaf, torch.Tensor):
        return _dimension(name, leaf, spec) if spec or leaf.ndim else None
    if spec is not None:
        raise BatchError(f"{name} is {describe(leaf)}, no tensor: use Replicate(), not {spec}")
    # A mask for one sample holds for all.
    return 0 if _is_block_mask(leaf) and leaf.shape[0] > 1 else None


def _dimension(name: str, tensor: torch.Tensor, spec: TensorChunkSpec | None) -> int:
    """The dimension along which a tensor is cut or joined, counted from the front."""
    dim = spec.split_dim if spec else 0
    if not isinstance(dim, int) or not -tensor.ndim <= dim < tensor.ndim:
        fits = f"one from {-tensor.ndim} to {tensor.ndim - 1}" if tensor.ndim else "Replicate()"
        raise BatchError(f"{name} is {describe(tensor)}: it has no dimension {dim!r}; use {fits}")
    dim %= tensor.ndim
    if is_sharded(tensor) and any(placed.is_shard(dim) for placed in tensor.placements):
        raise BatchError(
            f"{name} is {describe(tensor)}, whose shards along dimension {dim} are not cut or "
            "joined; redistribute it, or use it as a plain tensor with this rank's rows"
        )
    return dim


def _merged(name: str, values: Sequence[Any], spec: Any) -> Any:
    """The leaves of the micro-batches as one: tensors joined, equal values once."""
    first = values[0]
    if isinstance(first, torch.Tensor) and not _is_whole(spec):
        dim = _dimension(name, first, spec) if first.ndim else 0
        try:
            return torch.cat(list(values), dim) if first.ndim else torch.stack(list(values))
        except (RuntimeError, TypeError) as error:
            shown = ", ".join(map(describe, values))
            raise BatchError(
                f"{name} cannot be joined along dimension {dim}: it is {shown} in the "
                f"micro-batches ({text_of(error)})"
            ) from error
    if isinstance(spec, TensorChunkSpec):
        raise BatchError(f"{name} is {describe(first)}, no tensor: use Replicate(), not {spec}")
    for number, value in enumerate(values[1:], 1):
        tensors = isinstance(first, torch.Tensor) and isinstance(value, torch.Tensor)
        if value is not first and not (torch.equal(first, value) if tensors else first == value):
            raise BatchError(
                f"{name} is {describe(first)} in micro-batch 0, but another value in micro-batch "
                f"{number}, {describe(value)}; return tensors, or equal values"
            )
    return first


def _cut_block_mask(mask: Any, chunks: int) -> list[Any]:
    """Masks for the parts of a batch, as views: the batch is dimension 0 of all their tensors."""

    def part(start: int, stop: int) -> Any:
        cut = copy.copy(mask)
        for attribute, value in vars(mask).items():
            if isinstance(value, torch.Tensor) and value.shape[0] == mask.shape[0]:
                setattr(cut, attribute, value[start:stop])
        # The function counts samples from the start of the batch, attention from that of its part.
        cut.mask_mod = lambda b, h, q, kv: mask.mask_mod(b + start, h, q, kv)
        return cut

    return [part(*pair) for pair in pairwise(bounds(mask.shape[0], chunks))]


def _children(value: Any) -> dict[Any, Any] | None:
    """The values in a container, by key or position; None for a leaf."""
    if isinstance(value, torch.Tensor) or _is_block_mask(value):
        return None
    children, tree = pytree.tree_flatten(value, is_leaf=lambda inner: inner is not value)
    keyed = isinstance(value, Mapping) and len(value) == len(children)
    keys = value if keyed else range(len(children))
    return None if tree.is_leaf() else dict(zip(keys, children, strict=True))


def _flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    return pytree.tree_flatten(value, is_leaf=_is_block_mask)


def _is_whole(spec: object) -> bool:
    return spec is Replicate or isinstance(spec, Replicate)


def _is_block_mask(value: object) -> bool:
    """Whether a value is a mask of FlexAttention, a leaf here, though torch may have registered it.

    None is, if that was never imported.
    """
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return isinstance(value, getattr(module, "BlockMask", ()))


@dataclass(frozen=True, slots=True)
class Cutter:
    """How a schedule cuts batches."""

    microbatches: int
    args_spec: tuple[Any, ...] | None = None
    kwargs_spec: dict[str, Any] | None = None
    target_spec: Any = None
    """With a spec of its own, the target may have other rows than the batch."""
    fewer: bool = False
    """Whether a batch with fewer rows is cut into fewer micro-batches."""

    def parts(self, rows: int) -> int:
        """The number of micro-batches of a batch with ``rows``; 0 stands for unknown."""
        return min(self.microbatches, rows) if self.fewer and rows else self.microbatches


@dataclass(slots=True)
class Batch:
    """The arguments and target of a step, whole or as micro-batches; a rank uses its part."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    arg_mbs: Sequence[tuple[Any, ...]] | None = None
    kwarg_mbs: Sequence[dict[str, Any]] | None = None
    target_mbs: Sequence[Any] | None = None
    cutter: Cutter = Cutter(1)

    def cut(self) -> tuple[int, Sequence[Sequence[Any]], Sequence[Mapping[str, Any]]]:
        """The rows of the batch, 0 if unknown, and the arguments of each micro-batch.

        >>> Batch((torch.arange(3),), cutter=Cutter(2)).cut()
        (3, [(tensor([0, 1]),), (tensor([2]),)], [{}, {}])
        """
        specs = self.cutter.args_spec, self.cutter.kwargs_spec
        rows, args, kwargs = _cut(self.args, self.kwargs, specs, self.cutter.parts)
        self.check(rows)
        args = args if self.arg_mbs is None else self.arg_mbs
        return rows, args, kwargs if self.kwarg_mbs is None else self.kwarg_mbs

    def targets(self, rows: int) -> Sequence[Any] | None:
        """The target of each micro-batch, cut like a batch with ``rows``; None: no target.

        >>> flat = Batch(target=torch.arange(6), cutter=Cutter(2))  # two a row
        >>> [part.tolist() for part in flat.targets(3)]
        [[0, 1, 2, 3], [4, 5]]
        """
        if self.target_mbs is not None or self.target is None:
            return self.target_mbs
        size, parts = self.target_size(), self.cutter.parts(rows)
        each = size // rows if rows and size and size % rows == 0 else 1
        spec = self.cutter.target_spec
        return split_value(self.target, parts, spec=spec, name="target", each=each)

    def target_size(self) -> int:
        """The rows of the target; 0 if unknown."""
        return _Cuts([("target", self.target, self.cutter.target_spec)]).rows

    def check(self, rows: int) -> None:
        """Raise if micro-batches from the caller do not fit to a batch with so many rows."""
        parts = self.cutter.parts(rows)
        whole = {"arg": self.args, "kwarg": self.kwargs, "target": self.target is not None}
        for name, given in whole.items():
            chunks = getattr(self, f"{name}_mbs")
            if chunks is not None and given:
                raise BatchError(f"pass {name}_mbs or the whole batch, not both")
            if chunks is not None and len(chunks) != parts:
                has = counted(len(chunks), "micro-batch")
                raise BatchError(f"{name}_mbs has {has}, but this batch has {parts}; pass {parts}")


LossWeights: TypeAlias = Sequence[float] | torch.Tensor | Callable[[Any], float | torch.Tensor]
"""One number a micro-batch, or a function that returns it for a micro-batch's target."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of step() or eval()."""

    batch: Batch = field(default_factory=Batch)
    number: int = 0  # of the training step, for seeds
    trains: bool = False
    outputs: bool = True
    losses: list[torch.Tensor] | None = None  # to fill
    aux_losses: list[torch.Tensor] | None = None
    share_losses: bool = False  # whether every rank gets the losses
    loss_keywords: Mapping[str, Any] = field(default_factory=dict)
    loss_weights: LossWeights | None = None
    scale_grads: bool = True
    grad_scale: float = 1.0  # for every gradient, so that none underflows in half precision
    finalizes: bool = True  # whether gradients of sharded stages are reduced

    def __str__(self) -> str:
        step = "step()" if self.finalizes else "step(finalize_gradients=False)"
        return step if self.trains else "eval()"

    @property
    def wants_losses(self) -> bool:
        """Whether this rank keeps the losses that it computes."""
        return self.share_losses or self.losses is not None

    def check(self) -> None:
        """Raise if the arguments are of the wrong type."""
        for name, wanted in (("losses", self.losses), ("aux_losses", self.aux_losses)):
            if wanted is not None and not isinstance(wanted, list):
                raise BatchError(f"{name} must be a list to fill, not {type(wanted).__name__}")
        if not isinstance(self.finalizes, bool):
            raise BatchError(f"finalize_gradients must be True or False, not {self.finalizes!r}")
        if self.trains and not torch.is_grad_enabled():
            raise MismatchError("step() trains, but under torch.no_grad() it cannot; call eval()")


@dataclass(slots=True)
class Feed:
    """The micro-batches of a step on one rank, and their results."""

    call: Call = Call()
    rows: int = 0
    """The rows of the batch, agreed on by all ranks; 0 if unknown."""
    microbatches: int = 0
    arguments: Sequence[Sequence[Any]] = ()
    keywords: Sequence[Mapping[str, Any]] = ()
    targets: Sequence[Any] | None = None
    scales: Sequence[float] = ()
    """The weight of each micro-batch's loss in the gradient."""
    added_scales: Sequence[float] = ()
    """The weight of the losses that stages add, for each micro-batch."""
    counts: torch.Tensor | None = None
    """In a captured step, which is replayed: these times ``grad_scale``, both on the device."""
    outputs: dict[int, Any] | None = None
    """Outputs of the last stage; None if the caller does not want them."""
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    aux_losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """The sum of the losses that this rank's stages add, for each micro-batch."""
    observed: list[list[tuple[Any, Any]]] = field(default_factory=list)
    """Statistics from the modules of each forward, applied at the end of the step."""

    def clear(self) -> None:
        """Reset every field."""
        self.__init__()
