"""A submodule without its data, to find the shapes and types that it returns."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline import pytree
from taktline.device import keep_generators
from taktline.errors import PartitionError
from taktline.meta import TensorMeta
from taktline.private import private
from taktline.side_values import Aside, Skip
from taktline.split.arguments import NUMBERS, Args, Kwargs, Number, tensors_in
from taktline.split.named.data_dependent import Guess, Numbers
from taktline.split.named.hugging_face import collected_lists
from taktline.split.named.known_calls import CallCache, autocast_dtype, cache_key
from taktline.split.named.mutable import is_constant, version_of
from taktline.split.named.placeholder import Placeholder, PlaceholderContext, as_meta, here
from taktline.split.named.side_effects import FullOutput, StateBefore

_without_fakes = private("torch._subclasses.fake_tensor.unset_fake_temporarily", "a split by names")

Flat = tuple[list[Any], pytree.TreeSpec]
"""An output as its leaves and its structure."""


class _Argument(NamedTuple):
    """A leaf of an output that is one of the arguments itself."""

    place: int


class _DataNumber(NamedTuple):
    """A leaf of an output that is a number, and depends on data."""

    kind: type[Number]


class _ProbeAside(Aside):
    """Keeps skips of probes as placeholders, and drops their losses."""

    def put(self, name: str, value: torch.Tensor) -> None:
        """Keep a skip for a later probe."""
        self.skips[name] = Skip(Placeholder.of(value, f"skip {name}", 0), self.stage)

    def add(self, loss: torch.Tensor) -> None:
        """Drop a loss: the stage that computes it adds it."""


@dataclass(eq=False, slots=True)
class ShapeProbe:
    """A copy of a submodule with placeholders as its parameters and buffers.

    Args:
        name: the name of the submodule in the model.
        module: the copy.
        training: whether the submodule was in training mode.
        skips: the skips that the probes of the model have put so far.
        hooked: gets the names of the foreign units that get hooks.
    """

    name: str
    module: nn.Module
    training: bool
    skips: dict[str, Skip]
    hooked: list[str]
    writes: set[int] = field(default_factory=set)
    """The leaves of its arguments that a call has changed in place."""
    leaves_more: bool = False
    """Whether a call has had side effects."""
    changes_buffers: bool = False
    """Whether a call has changed a buffer."""
    sizes: set[tuple[int, int]] = field(default_factory=set)
    """The leaves of its output, and their dimensions, whose sizes depend on data."""
    _known: CallCache[Flat] = field(default_factory=CallCache)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShapeProbe:
        return self  # the copy of a stage can use the same one

    def output(
        self, args: Args, kwargs: Kwargs, *, training: bool, stage: int, device: torch.device
    ) -> Any:
        """Placeholders in the structure of the submodule's output.

        A :class:`FullOutput` if the call has side effects.
        """
        lists = tuple((key, bool(part)) for key, part in collected_lists().items())
        key = (
            cache_key(args),
            cache_key(kwargs),
            training,
            device.type,
            autocast_dtype(device),
            lists,
        )
        parts, tree = self._known.find(key, lambda: self._learn(args, kwargs, training, device))
        if self.sizes:
            parts = [self._sized(leaf, part) for leaf, part in enumerate(parts)]
        if tree.is_leaf() and isinstance(parts[0], torch.Tensor):
            return Placeholder(parts[0], self.name, stage, device)  # most units return one tensor
        leaves = pytree.tree_leaves((args, kwargs))
        return pytree.tree_unflatten(
            [self._part(part, leaves, stage, device) for part in parts], tree
        )

    def forget(self) -> None:
        """Forget all outputs, as parameters have got another type."""
        self._known.clear()

    def note_sizes(self, leaves: Sequence[Any], numbers: Any) -> None:
        """Note the sizes that depend on data in an output of the real submodule."""
        for leaf, dimension in sorted(self.sizes):
            numbers.note_size(leaves[leaf].shape[dimension])

    def _sized(self, leaf: int, part: Any) -> Any:
        """A leaf of the output with the sizes that the stage of the submodule has noted."""
        dimensions = sorted(dimension for at, dimension in self.sizes if at == leaf)
        if not dimensions:
            return part
        numbers = None if here.context is None else here.context.numbers
        if numbers is None:
            raise PartitionError(
                f"the shape of what {self.name!r} returns depends on its data, which is not here"
            )
        shape = list(part.shape)
        for dimension in dimensions:
            shape[dimension] = numbers.take_size((shape[dimension], 0), self.name)
        return torch.empty(shape, dtype=part.dtype, device="meta")

    def _part(self, part: Any, leaves: list[Any], stage: int, device: torch.device) -> Any:
        """A leaf of the output for these arguments."""
        if isinstance(part, _Argument):
            return leaves[part.place]
        if isinstance(part, torch.Tensor):
            return Placeholder(part, self.name, stage, device)
        numbers = None if here.context is None else here.context.numbers
        if isinstance(part, _DataNumber):
            if numbers is None:
                raise PartitionError(
                    f"{self.name!r} returns a number that depends on its data, which is not here"
                )
            return numbers.take(part.kind, self.name)
        return part if numbers is None else numbers.note(part)

    def _learn(self, args: Args, kwargs: Kwargs, training: bool, device: torch.device) -> Flat:
        """Run the copy without data, or else with random data."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        self.module.train(training)
        # The result is used in other modes, too.
        with _without_fakes(), torch.inference_mode(False):
            try:
                # All tensors become placeholders: another call may have other data.
                empty = [
                    Placeholder.of(leaf, "an argument", 0)
                    if isinstance(leaf, torch.Tensor)
                    else _own(leaf)
                    for leaf in leaves
                ]
                large, small = (_guessing(device, usual) for usual in (0, 1))
                found = self._run(self.module, empty, spec, large)
                if large.numbers.is_sized:
                    self._compare_sizes(found, self._run(self.module, empty, spec, small))
                return found
            except Exception as error:
                # A forward that reads data may raise anything.
                return self._run_with_data(leaves, spec, device, error)

    def _run(
        self,
        module: nn.Module,
        leaves: Sequence[Any],
        spec: pytree.TreeSpec,
        context: PlaceholderContext,
    ) -> Flat:
        """The output of a copy, with meta tensors, and notes of what the call has changed."""
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        buffers = list(module.buffers())  # kept alive, so that no id is used again
        before = _versions(buffers)
        given = {at: leaf for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        versions = _versions(given.values())
        with context, _ProbeAside(0, self.skips), torch.no_grad():
            state = StateBefore(self.name, module, args, kwargs)
            try:
                output = state.with_effects(module(*args, **kwargs))
            finally:
                state.drop_collected()
        self.leaves_more |= type(output) is FullOutput
        after = zip(given, versions, _versions(given.values()), strict=True)
        self.writes |= {at for at, version, now in after if version != now}
        self.changes_buffers |= before != _versions(module.buffers())
        places = {id(leaf): place for place, leaf in enumerate(leaves) if not is_constant(leaf)}
        parts, tree = pytree.tree_flatten(output)
        learned: list[Any] = []
        for part in parts:
            if id(part) in places:
                learned.append(_Argument(places[id(part)]))
            elif isinstance(part, torch.Tensor):
                require_not_nested(part, f"{self.name!r} returns")
                learned.append(as_meta(part))
            else:
                learned.append(part)
        return learned, tree

    def _run_with_data(
        self, leaves: Sequence[Any], spec: pytree.TreeSpec, device: torch.device, error: Exception
    ) -> Flat:
        """Run copies with random data, twice, to see which sizes depend on the data."""
        found: list[Flat] = []
        with keep_generators([device]):
            for seed in range(2):
                torch.manual_seed(seed)
                tensors = (*self.module.parameters(), *self.module.buffers())
                memo = {id(tensor): _random_like(tensor, device) for tensor in tensors}
                context = PlaceholderContext(device)
                inputs = [_with_data(leaf, device, keep=not seed) for leaf in leaves]
                try:
                    made = self._run(copy.deepcopy(self.module, memo), inputs, spec, context)
                except PartitionError:
                    raise
                except Exception as other:
                    raise self._cannot_run(leaves, other) from other
                # Any number in the output may depend on the data.
                parts = [_DataNumber(type(p)) if type(p) in NUMBERS else p for p in made[0]]
                found.append((parts, made[1]))
        try:
            self._compare_sizes(*found)
        except ValueError:
            raise PartitionError(
                f"{_text(error)}\n\nOther stages must know what {self.name!r} returns without its "
                "data, but this fails (see above); return tensors of the same number and types for "
                "all data, or cut the model with taktline.pipeline, which traces it, or by hand"
            ) from error
        return found[0]

    def _compare_sizes(self, one: Flat, other: Flat) -> None:
        """Note in which sizes two outputs differ; raises ValueError if they differ in more."""
        if one[1] != other[1]:
            raise ValueError("the structure of the output depends on data")
        for leaf, (part, like) in enumerate(zip(one[0], other[0], strict=True)):
            if cache_key(part) != cache_key(like):
                is_sized = isinstance(part, torch.Tensor) and isinstance(like, torch.Tensor)
                if not is_sized or (part.ndim, part.dtype) != (like.ndim, like.dtype):
                    raise ValueError("more than sizes of the output depends on data")
                sizes = enumerate(zip(part.shape, like.shape, strict=True))
                self.sizes |= {(leaf, dimension) for dimension, (a, b) in sizes if a != b}

    def _cannot_run(self, leaves: Sequence[Any], error: Exception) -> PartitionError:
        metas = [TensorMeta(tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(leaves)]
        return PartitionError(
            f"{self.name!r}, given {', '.join(map(str, metas)) or 'no tensor'}, raises "
            f"{type(error).__name__}: {_text(error)}; pass arguments that fit the model, or, if "
            "they do, cut it with taktline.pipeline, which traces it, or by hand"
        )


def _guessing(device: torch.device, usual: int) -> PlaceholderContext:
    """A run that guesses sizes: all as large as possible, or with 1 as small."""
    context = PlaceholderContext(device)
    context.numbers = Numbers(context, guess=Guess(usual))
    return context


def _versions(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """The identities of tensors, and how often each was changed in place."""
    return [(id(tensor), version_of(tensor)) for tensor in tensors]


def _with_data(leaf: Any, device: torch.device, *, keep: bool) -> Any:
    """An argument with data: its own if there is any; random floats unless ``keep``."""
    if not isinstance(leaf, torch.Tensor):
        return _own(leaf)
    value = leaf.value if isinstance(leaf, Placeholder) else leaf
    if value is None or type(value) not in (torch.Tensor, nn.Parameter) or value.is_meta:
        return _random_like(leaf, device)
    if keep or not value.is_floating_point():
        return value.detach().clone()
    return _random_like(leaf, device)


def _own(leaf: Any) -> Any:
    """An argument that is not a tensor; a copy if the probe could change it, such as a cache."""
    return leaf if is_constant(leaf) else copy.deepcopy(leaf)


def _random_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor with random floats, or zeros of other types."""
    made = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device=device)
    if made.is_floating_point():
        made.normal_(0, 0.1)
    return nn.Parameter(made, False) if isinstance(tensor, nn.Parameter) else made


def require_not_nested(tensor: torch.Tensor, start: str) -> None:
    """Raise if a tensor is nested: its rows have different lengths."""
    if tensor.is_nested:
        raise PartitionError(
            f"{start} a nested tensor ({str(tensor.layout).removeprefix('torch.')}), which cannot "
            "go from stage to stage; pass its values() and offsets(), and rebuild it where it is "
            "used"
        )


def _text(error: Exception) -> str:
    return str(error).strip() or type(error).__name__
