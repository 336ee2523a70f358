"""A module as one flat graph, with marks where it is to be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from taktline.errors import PartitionError
from taktline.split.beside import recording, with_losses
from taktline.split.markers import SplitPoint, marked, require_outside, tracing

__all__ = ["Policy", "in_mode", "trace"]

Policy = Callable[[fx.GraphModule], fx.GraphModule]


def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    spec: Mapping[str, SplitPoint],
    policy: Policy | None,
) -> fx.GraphModule:
    """The module's graph, in the mode that it is in; the module itself is left as it was."""
    with marked(module, spec), tracing(), recording():
        program = _export(module, args, kwargs)
    # Without guards: those would refuse micro-batches of another size even where they fit.
    traced = program.module(check_guards=False)
    if not isinstance(traced, fx.GraphModule):
        raise PartitionError(f"torch.export gave a {type(traced).__name__}, not a graph")
    require_outside(traced)
    traced = with_losses(traced)
    if policy is not None:
        traced = policy(traced)
        if not isinstance(traced, fx.GraphModule):
            raise PartitionError(
                f"split_policy must return the GraphModule with its marks, not {traced!r}"
            )
    return traced


def _export(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> torch.export.ExportedProgram:
    # Here, because it loads the compiler.
    from torch.export import export

    if not isinstance(args, tuple):
        raise PartitionError(f"mb_args must be a tuple of arguments, not a {type(args).__name__}")
    try:
        return export(module, args, kwargs, strict=False)
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        caches = getattr(getattr(module, "config", None), "use_cache", False)
        raise PartitionError(
            f"{reason}\n\ntorch.export cannot export {type(module).__name__} (see above). "
            f"{'Set model.config.use_cache = False. ' if caches else ''}Change what it stumbles "
            "over, or cut the model with taktline.split.by_names, which does not trace it, or by "
            "hand"
        ) from error


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """A module in training or evaluation; afterwards each part is as it was."""
    before = {part: part.training for part in module.modules()}
    try:
        module.train(training)
        yield
    finally:
        for part, mode in before.items():
            part.training = mode
