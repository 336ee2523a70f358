"""A submodule without its data: what it returns is known by shape and type."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from taktline import pytree
from taktline.errors import PartitionError
from taktline.meta import TensorMeta
from taktline.side_values import Aside, Skip
from taktline.split.example import Args, Kwargs
from taktline.split.named.looks import Recent, autocast_of, look
from taktline.split.named.mutable import is_constant
from taktline.split.named.numbers import NUMBERS, Number
from taktline.split.named.of_transformers import lists
from taktline.split.named.placeholder import Placeholder, PlaceholderContext, as_meta, here
from taktline.split.named.recorded import Before, Recorded, recorded

__all__ = ["ShapeProbe", "require_plain"]


class _Given(NamedTuple):
    """A part of an output that is one of the arguments itself."""

    place: int


class _Asked(NamedTuple):
    """A part of an output that is a number, which depends on data."""

    kind: type[Number]


class _Likely:
    """Sizes that depend on data: all as large as can be, or as small."""

    def __init__(self, which: int) -> None:
        self._which = which
        self.is_asked = False

    def take_size(self, likely: Sequence[int], maker: str) -> int:
        """A guess."""
        self.is_asked = True
        return likely[self._which]


class _Beside(Aside):
    """Skips and losses of probes: known by shape, and kept from the pipeline."""

    def put(self, name: str, value: torch.Tensor) -> None:
        """Keep what a later probe will get."""
        self.skips[name] = Skip(Placeholder.of(value, f"skip {name}", 0), self.stage)

    def add(self, loss: torch.Tensor) -> None:
        """Drop it: it counts in the stage that computes it."""


@dataclass(eq=False, slots=True)
class ShapeProbe:
    """A copy of a submodule in which placeholders are in the place of parameters and buffers.

    Args:
        name: what it is called in the model.
        module: the copy.
        training: whether the submodule was in training mode.
        skips: what the probes of a model have put so far.
        hooked: the names of those that hooks were registered with, in any piece.
    """

    name: str
    module: nn.Module
    training: bool
    skips: dict[str, Skip]
    hooked: list[str]
    writes: set[int] = field(default_factory=set)
    """The places of tensors, among its arguments, that a call was seen to change in place."""
    leaves_more: bool = False
    """Whether a call was seen to leave something behind beside its output."""
    changes_buffers: bool = False
    """Whether a call was seen to change a buffer."""
    sizes: set[tuple[int, int]] = field(default_factory=set)
    """The leaves of its output, and their dimensions, whose sizes were seen to depend on data."""
    _known: Recent[tuple[list[Any], pytree.TreeSpec]] = field(default_factory=Recent)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShapeProbe:
        return self  # the copy of a piece can learn from the same one

    def output(
        self,
        args: Args,
        kwargs: Kwargs,
        *,
        training: bool,
        stage: int,
        device: torch.device,
    ) -> Any:
        """Placeholders in the arrangement of what the submodule returns for such arguments.

        With what is collected from inside of it, if the model that is running collects something.
        """
        lately = tuple((key, bool(part)) for key, part in lists().items())
        key = (look(args), look(kwargs), training, device.type, autocast_of(device), lately)
        parts, tree = self._known.find(key, lambda: self._learn(args, kwargs, training, device))
        if self.sizes:
            parts = [self._sized(leaf, part) for leaf, part in enumerate(parts)]
        if tree.is_leaf() and isinstance(parts[0], torch.Tensor):
            return Placeholder(parts[0], self.name, stage, device)  # as most often
        leaves = pytree.tree_leaves((args, kwargs))
        return pytree.tree_unflatten(
            [self._remade(part, leaves, stage, device) for part in parts], tree
        )

    def forget(self) -> None:
        """Learn anew, as parameters have got another type."""
        self._known.clear()

    def note_sizes(self, leaves: Sequence[Any], numbers: Any) -> None:
        """Note the sizes of what the submodule itself has returned, as others will take them."""
        for leaf, dimension in sorted(self.sizes):
            numbers.note_size(leaves[leaf].shape[dimension])

    def _sized(self, leaf: int, part: Any) -> Any:
        """A part of the output in the sizes that it has in the stage that has the submodule."""
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

    def _remade(self, part: Any, leaves: list[Any], stage: int, device: torch.device) -> Any:
        if isinstance(part, _Given):
            return leaves[part.place]
        if isinstance(part, torch.Tensor):
            return Placeholder(part, self.name, stage, device)
        numbers = None if here.context is None else here.context.numbers
        if isinstance(part, _Asked):
            if numbers is None:
                raise PartitionError(
                    f"{self.name!r} returns a number that depends on its data, which is not here"
                )
            return numbers.take(part.kind, self.name)
        return part if numbers is None else numbers.note(part)

    def _learn(
        self, args: Args, kwargs: Kwargs, training: bool, device: torch.device
    ) -> tuple[list[Any], pytree.TreeSpec]:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        self.module.train(training)
        with unset_fake_temporarily():  # what is learned holds in other modes, too
            try:
                return self._run_sized([_as_placeholder(leaf) for leaf in leaves], spec, device)
            except Exception as error:
                # Whatever it is that cannot be done without data: try with data that is made up.
                return self._run_with_data(leaves, spec, device, error)

    def _run_sized(
        self, leaves: Sequence[Any], spec: pytree.TreeSpec, device: torch.device
    ) -> tuple[list[Any], pytree.TreeSpec]:
        """What the copy returns without data; once more where sizes inside of it depend on data."""
        sizes = _Likely(0)
        found = self._run(self.module, leaves, spec, device, sizes)
        if sizes.is_asked:
            self._note_sizes(found, self._run(self.module, leaves, spec, device, _Likely(1)))
        return found

    def _run(
        self,
        module: nn.Module,
        leaves: Sequence[Any],
        spec: pytree.TreeSpec,
        device: torch.device,
        sizes: _Likely | None = None,
    ) -> tuple[list[Any], pytree.TreeSpec]:
        """What a copy returns: its parts are known by shape, or are one of the arguments."""
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        kept = list(module.buffers())
        before = _versions(kept)
        given = {at: leaf for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        versions = _versions(given.values())
        with PlaceholderContext(device) as context, _Beside(0, self.skips), torch.no_grad():
            context.numbers = sizes
            state = Before(self.name, module, args, kwargs)
            output = state.left(recorded(lambda: module(*args, **kwargs)))
        self.leaves_more |= type(output) is Recorded
        after = zip(given, versions, _versions(given.values()), strict=True)
        self.writes |= {at for at, version, now in after if version != now}
        self.changes_buffers |= before != _versions(module.buffers())
        places = {id(leaf): place for place, leaf in enumerate(leaves) if not is_constant(leaf)}
        parts, tree = pytree.tree_flatten(output)
        learned: list[Any] = []
        for part in parts:
            if id(part) in places:
                learned.append(_Given(places[id(part)]))
            elif isinstance(part, torch.Tensor):
                require_plain(part, f"{self.name!r} returns")
                learned.append(as_meta(part))
            else:
                learned.append(part)
        return learned, tree

    def _run_with_data(
        self,
        leaves: Sequence[Any],
        spec: pytree.TreeSpec,
        device: torch.device,
        error: Exception,
    ) -> tuple[list[Any], pytree.TreeSpec]:
        """The same with data that is made up, to see which sizes depend on it."""
        devices = [device] if device.type == "cuda" else []
        found: list[tuple[list[Any], pytree.TreeSpec]] = []
        with torch.random.fork_rng(devices=devices):
            for seed in range(2):
                torch.manual_seed(seed)
                tensors = (*self.module.parameters(), *self.module.buffers())
                memo = {id(placeholder): _made_up(placeholder, device) for placeholder in tensors}
                inputs = [_with_data(leaf, device, keep=not seed) for leaf in leaves]
                try:
                    made = self._run(copy.deepcopy(self.module, memo), inputs, spec, device)
                except PartitionError:
                    raise
                except Exception as other:
                    raise self._unable(leaves, other) from other
                found.append(made)
        one, other = (([_asked(part) for part in parts], tree) for parts, tree in found)
        try:
            self._note_sizes(one, other)
        except ValueError:
            raise self._no_shapes(error) from error
        return one

    def _note_sizes(
        self, one: tuple[list[Any], pytree.TreeSpec], other: tuple[list[Any], pytree.TreeSpec]
    ) -> None:
        """Note in which sizes two outputs differ; raise if they differ in more."""
        if one[1] != other[1]:
            raise ValueError("the arrangement of the output depends on data")
        for leaf, (part, like) in enumerate(zip(one[0], other[0], strict=True)):
            if look(part) != look(like):
                if not _is_like(part, like):
                    raise ValueError("more than sizes of the output depends on data")
                sizes = enumerate(zip(part.shape, like.shape, strict=True))
                self.sizes |= {(leaf, dimension) for dimension, (a, b) in sizes if a != b}

    def _unable(self, leaves: Sequence[Any], error: Exception) -> PartitionError:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        given = [str(TensorMeta(tuple(tensor.shape), tensor.dtype)) for tensor in tensors]
        return PartitionError(
            f"{self.name!r}, given {', '.join(given) or 'no tensor'}, raises "
            f"{type(error).__name__}: {_reason(error)}; pass what fits the model, or, if it does "
            "take that, cut it with taktline.pipeline, which traces it, or by hand"
        )

    def _no_shapes(self, error: Exception) -> PartitionError:
        return PartitionError(
            f"{_reason(error)}\n\nOther stages need to know what {self.name!r} returns without "
            "its data, and cannot find that out (see above); let it return as many tensors of the "
            "same types for all data, or cut the model with taktline.pipeline, which traces it, or "
            "by hand"
        )


def _is_like(part: Any, other: Any) -> bool:
    """Whether parts are tensors that differ in nothing but their sizes."""
    if not (isinstance(part, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    return (part.ndim, part.dtype) == (other.ndim, other.dtype)


def _asked(part: Any) -> Any:
    """A part of what was made of data: whatever number it is, it may be another one."""
    return _Asked(type(part)) if type(part) in NUMBERS else part


def _versions(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Which tensors these are, and how often each was changed."""
    return [(id(tensor), tensor._version) for tensor in tensors]


def _as_placeholder(leaf: Any) -> Any:
    """An argument without data: shapes that depend on data hold for no other."""
    if isinstance(leaf, torch.Tensor):
        return Placeholder.of(leaf, "an argument", 0)
    return _apart(leaf)


def _with_data(leaf: Any, device: torch.device, *, keep: bool) -> Any:
    """An argument with data: its own, as far as there is any; unless ``keep``, no fractions."""
    if not isinstance(leaf, torch.Tensor):
        return _apart(leaf)
    value = leaf.value if isinstance(leaf, Placeholder) else leaf
    if value is None or type(value) not in (torch.Tensor, nn.Parameter) or value.is_meta:
        return _made_up(leaf, device)
    return (
        value.detach().clone() if keep or not value.is_floating_point() else _made_up(leaf, device)
    )


def _apart(leaf: Any) -> Any:
    """An argument that is no tensor; a cache must not get what a probe returns."""
    return leaf if is_constant(leaf) else copy.deepcopy(leaf)


def _made_up(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like another one, with some data."""
    made = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device=device)
    if made.is_floating_point():
        made.normal_(0, 0.1)
    return nn.Parameter(made, False) if isinstance(tensor, nn.Parameter) else made


def require_plain(tensor: torch.Tensor, whence: str) -> None:
    """Raise if a tensor cannot go from stage to stage, as its rows have different lengths."""
    if tensor.is_nested:
        raise PartitionError(
            f"{whence} a nested tensor ({str(tensor.layout).removeprefix('torch.')}), which cannot "
            "go from stage to stage; hand on its values() and offsets(), and put it together where "
            "it is used"
        )


def _reason(error: Exception) -> str:
    return str(error).strip() or type(error).__name__
