"""Models that are chains of modules, one after the other: a piece is a slice of the chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from taktline.errors import PartitionError
from taktline.split.example import Args, Kwargs
from taktline.split.named.containers import containers_of, copied, joined
from taktline.split.named.course import Cut
from taktline.split.named.looks import Recent, look
from taktline.split.named.mutable import copies
from taktline.split.named.replacement import made_from

__all__ = ["sliced"]

_AROUND = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_parameters",
    "_buffers",
    "_compiled_call_impl",
)
"""What a container may have beside its modules, and a chain has not."""


def sliced(model: nn.Module, cuts: Sequence[Cut]) -> list[nn.Module] | None:
    """The pieces of a chain, each with its own modules alone; None if it cannot be proved one.

    A chain is an ``nn.Sequential`` with the forward of ``nn.Sequential``, as are those in it that
    a cut goes through.
    """
    containers = containers_of(model, cuts)
    if not all(_is_chain(model.get_submodule(name)) for name in containers):
        return None
    homes: dict[str, int] = {}
    starts: list[Cut] = []
    for name in _links(model, "", containers):
        starts += [Cut(name)] if Cut(name) in cuts else []
        homes[name] = len(starts)
    if starts != list(cuts):
        return None  # not in this order, which the general way says

    def piece(stage: int) -> nn.Module:
        def child(name: str, module: nn.Module) -> nn.Module | None:
            return module if homes[name] == stage else None

        made = copied(model, "", containers, child)
        for name in sorted(containers - {""}, key=len, reverse=True):
            parent, _, key = name.rpartition(".")
            if not made.get_submodule(name)._modules:
                del made.get_submodule(parent)._modules[key]
        made.__class__ = made_from(type(model), _Slice)
        vars(made)["_place"] = _Place(stage, stage == len(cuts))
        return made

    return [piece(stage) for stage in range(len(cuts) + 1)]


class _Slice:
    """Mixed into the class of a chain that is cut."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage."""
        place: _Place = vars(self)["_place"]
        forward = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if place.compiled is not None:
            forward = partial(place.compiled, self)
        return place.run(forward, vars(self)["training"], args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile what the slice does, but not what looks after its values."""
        place: _Place = vars(self)["_place"]
        place.compiled = torch.compile(nn.Sequential.forward, *args, **kwargs)


@dataclass(eq=False, slots=True)
class _Place:
    """Where a slice is in its chain."""

    stage: int
    last: bool
    compiled: Callable[..., Any] | None = None
    """The forward of a chain, of any one; or None."""
    _changed: Recent[bool] = field(default_factory=Recent)
    """Whether calls of a kind change in place what they are given."""

    def run(
        self,
        forward: Callable[..., Any],
        training: bool,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """The output of a slice, as one value."""
        if self.stage == 0:
            output = forward(*args, **kwargs)
        elif len(args) == 1:
            # Keywords of a rank reach all its stages; the model's are for the first.
            output = self._run_later(forward, args[0], training)
        else:
            raise PartitionError(
                f"stage {self.stage} takes the one value that stage {self.stage - 1} returns, not "
                f"{len(args)} arguments"
            )
        # The next stage would take a tuple for several arguments.
        return output if self.last or isinstance(output, torch.Tensor) else (output,)

    def _run_later(self, forward: Callable[[Any], Any], value: Any, training: bool) -> Any:
        """Run a later stage with its value, or with a copy of it, which can be changed in place."""
        if isinstance(value, torch.Tensor) and not value.requires_grad:
            return forward(value)
        kind = (look(value), training)
        changed = self._changed.get(kind)
        if changed is False:
            return forward(value)
        value, made = copies(value)
        output = forward(value)
        if changed is None:
            self._changed.keep(kind, any(copy._version for copy in made))
        return output


def _is_chain(container: nn.Module) -> bool:
    if not isinstance(container, nn.Sequential):
        return False
    kind = type(container)
    return (
        kind.forward is nn.Sequential.forward
        and kind.__iter__ is nn.Sequential.__iter__
        and kind.__call__ is nn.Module.__call__
        and "forward" not in vars(container)
        and not any(vars(container).get(name) for name in _AROUND)
        and None not in container._modules.values()
    )


def _links(container: nn.Module, path: str, containers: frozenset[str]) -> list[str]:
    """The names of the modules of a chain, in the order of their calls."""
    found: list[str] = []
    for key, module in container._modules.items():
        name = joined(path, key)
        if module is not None and name in containers:
            found += _links(module, name, containers)
        else:
            found.append(name)
    return found
