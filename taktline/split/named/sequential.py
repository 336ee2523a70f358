"""Cuts an ``nn.Sequential`` into slices, each with its own modules alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from taktline.errors import PartitionError
from taktline.split.arguments import Args, Kwargs
from taktline.split.named.changes import HOOKS
from taktline.split.named.containers import containers_of, copied, joined
from taktline.split.named.forward_summary import Cut
from taktline.split.named.known_calls import CallCache, cache_key
from taktline.split.named.mutable import with_copies
from taktline.split.named.units import derived_class

_BESIDES = (*HOOKS, "_parameters", "_buffers", "_compiled_call_impl")
"""What a container may have besides its modules; a chain has none of it."""


def slice_sequential(model: nn.Module, cuts: Sequence[Cut]) -> list[nn.Module] | None:
    """The slices of a chain; None if the model is not a chain, or the cuts are not in its order.

    A chain is an ``nn.Sequential`` with the forward of ``nn.Sequential``, as are those in it that
    a cut goes through.
    """
    containers = containers_of(model, cuts)
    if not all(_is_chain(model.get_submodule(name)) for name in containers):
        return None
    homes: dict[str, int] = {}
    starts: list[Cut] = []
    for name in _module_names(model, "", containers):
        starts += [Cut(name)] if Cut(name) in cuts else []
        homes[name] = len(starts)
    if starts != list(cuts):
        return None

    def sliced(stage: int) -> nn.Module:
        def child(name: str, module: nn.Module) -> nn.Module | None:
            return module if homes[name] == stage else None

        made = copied(model, "", containers, child)
        for name in sorted(containers - {""}, key=len, reverse=True):
            parent, _, key = name.rpartition(".")
            if not made.get_submodule(name)._modules:
                del made.get_submodule(parent)._modules[key]
        made.__class__ = derived_class(type(model), _Slice)
        vars(made)["_slice_forward"] = _SliceForward(stage, is_last=stage == len(cuts))
        return made

    return [sliced(stage) for stage in range(len(cuts) + 1)]


class _Slice:
    """Mixed into the class of a chain that is cut."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage."""
        slice_forward: _SliceForward = vars(self)["_slice_forward"]
        forward = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if slice_forward.compiled is not None:
            forward = partial(slice_forward.compiled, self)
        return slice_forward.run(forward, vars(self)["training"], args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the modules of the slice, without the code that copies its input."""
        slice_forward: _SliceForward = vars(self)["_slice_forward"]
        slice_forward.compiled = torch.compile(nn.Sequential.forward, *args, **kwargs)


class _SliceForward:
    """Runs one slice."""

    def __init__(self, stage: int, *, is_last: bool) -> None:
        self._stage = stage
        self._is_last = is_last
        self.compiled: Callable[..., Any] | None = None
        """The compiled forward of ``nn.Sequential``."""
        self._writes: CallCache[bool] = CallCache()
        """Whether calls with such arguments change them in place."""

    def run(self, forward: Callable[..., Any], training: bool, args: Args, kwargs: Kwargs) -> Any:
        """The output of a slice, as one value."""
        if self._stage == 0:
            output = forward(*args, **kwargs)
        elif len(args) == 1:
            # Keywords of a rank reach all its stages; the model's are for the first.
            output = self._run_later(forward, args[0], training)
        else:
            raise PartitionError(
                f"stage {self._stage} takes the one value that stage {self._stage - 1} returns, "
                f"not {len(args)} arguments"
            )
        # The next stage would take a tuple for several arguments.
        return output if self._is_last or isinstance(output, torch.Tensor) else (output,)

    def _run_later(self, forward: Callable[[Any], Any], value: Any, training: bool) -> Any:
        """Run a later stage with its input, or with a copy if the slice may change it in place."""
        if isinstance(value, torch.Tensor) and not value.requires_grad:
            return forward(value)
        key = (cache_key(value), training)
        writes = self._writes.get(key)
        if writes is False:
            return forward(value)
        value, copies = with_copies(value)
        output = forward(value)
        if writes is None:
            self._writes.keep(key, any(copy._version for copy in copies))
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
        and not any(vars(container).get(name) for name in _BESIDES)
        and None not in container._modules.values()
    )


def _module_names(container: nn.Module, path: str, containers: frozenset[str]) -> list[str]:
    """The names of the modules of a chain, in the order of their calls."""
    found: list[str] = []
    for key, module in container._modules.items():
        name = joined(path, key)
        if module is not None and name in containers:
            found += _module_names(module, name, containers)
        else:
            found.append(name)
    return found
