"""A submodule without its data: what it gives is known by shape and type."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from taktline.aside import Aside, Skip
from taktline.errors import PartitionError
from taktline.split.named.ghost import Absent, Ghost, Scene, as_meta
from taktline.split.named.recent import Recent

__all__ = ["Twin", "autocast_of", "is_constant", "look"]


class _Given(NamedTuple):
    """A part of an output that is one of the arguments itself."""

    place: int


class _Beside(Aside):
    """Skips and losses of twins: known by shape, and kept from the pipeline."""

    def put(self, name: str, value: torch.Tensor) -> None:
        """Keep what a later twin will get."""
        self.skips[name] = Skip(Ghost.of(value, f"skip {name}", 0), self.stage)

    def add(self, loss: torch.Tensor) -> None:
        """Drop it: it counts in the stage that computes it."""


@dataclass(eq=False, slots=True)
class Twin:
    """A copy of a submodule in which ghosts are in the place of parameters and buffers.

    Args:
        name: what it is called in the model.
        module: the copy.
        training: whether the submodule was in training mode.
        skips: what the twins of a model have put so far.
        hooked: the names of those that hooks were registered with, in any piece.
    """

    name: str
    module: nn.Module
    training: bool
    skips: dict[str, Skip]
    hooked: list[str]
    _known: Recent[tuple[list[Any], pytree.TreeSpec]] = field(default_factory=Recent)

    def __deepcopy__(self, memo: dict[int, Any]) -> Twin:
        return self  # the copy of a piece can learn from the same one

    def output(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        training: bool,
        stage: int,
        device: torch.device,
    ) -> Any:
        """Ghosts in the arrangement of what the submodule gives for such arguments."""
        key = (look(args), look(kwargs), training, device.type, autocast_of(device))
        parts, tree = self._known.find(key, lambda: self._learn(args, kwargs, training, device))
        if tree.is_leaf() and isinstance(parts[0], torch.Tensor):
            return Ghost(parts[0], self.name, stage, device)  # as most often
        leaves = pytree.tree_leaves((args, kwargs))
        return pytree.tree_unflatten(
            [self._remade(part, leaves, stage, device) for part in parts], tree
        )

    def forget(self) -> None:
        """Learn anew: parameters have got another type."""
        self._known.clear()

    def _remade(self, part: Any, leaves: list[Any], stage: int, device: torch.device) -> Any:
        if isinstance(part, _Given):
            return leaves[part.place]
        if isinstance(part, torch.Tensor):
            return Ghost(part, self.name, stage, device)
        return part

    def _learn(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool, device: torch.device
    ) -> tuple[list[Any], pytree.TreeSpec]:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # Shapes that depend on data hold for no other; and a cache must not get what a twin gives.
        inputs = [
            Ghost.of(leaf, "an argument", 0)
            if isinstance(leaf, torch.Tensor)
            else leaf
            if is_constant(leaf)
            else copy.deepcopy(leaf)
            for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(inputs, spec)
        self.module.train(training)
        with Scene(device), _Beside(0, self.skips), torch.no_grad():
            try:
                output = self.module(*args, **kwargs)
            except Exception as error:
                raise PartitionError(
                    f"{_reason(error)}\n\nOther stages need to know the shapes of what "
                    f"{self.name!r} gives, and it cannot tell them without data (see above); cut "
                    "the model with taktline.pipeline, which traces it, or by hand"
                ) from error
        places = {id(leaf): place for place, leaf in enumerate(inputs) if not is_constant(leaf)}
        parts, tree = pytree.tree_flatten(output)
        learned: list[Any] = []
        for part in parts:
            if id(part) in places:
                learned.append(_Given(places[id(part)]))
            else:
                learned.append(as_meta(part) if isinstance(part, torch.Tensor) else part)
        return learned, tree


def look(value: Any) -> Any:
    """What a forward can see of an argument without its data, to be compared.

    Without pytree where possible: this runs for every submodule before a stage, each time.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind, *[look(part) for part in value])
    if kind is dict:
        return (kind, *[(key, look(part)) for key, part in value.items()])
    if kind is Absent:
        return value
    if isinstance(value, torch.Tensor):
        plain = value.meta if isinstance(value, Ghost) else value  # which answers faster
        return (plain.shape, plain.stride(), plain.dtype)
    if is_constant(value):
        return (kind, value)
    leaves, spec = pytree.tree_flatten(value)
    return type(value) if spec.is_leaf() else (spec, *map(look, leaves))


def is_constant(leaf: object) -> bool:
    """Whether a part of an argument is all that there is to know of it."""
    return leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device))


def _reason(error: Exception) -> str:
    return str(error).strip() or type(error).__name__


def autocast_of(device: torch.device) -> torch.dtype | None:
    """The type that autocast gives to results on a device."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
