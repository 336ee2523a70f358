"""A module as one flat graph, with marks where it is to be cut."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import has_side_effect

from taktline import pytree
from taktline.errors import PartitionError
from taktline.side_values import Aside, add_loss
from taktline.split.example import Args, Kwargs
from taktline.split.traced.markers import SplitPoint, marked, require_outside, tracing
from taktline.split.traced.sizes import batch_dims

__all__ = ["Policy", "in_mode", "trace"]

_log = logging.getLogger("taktline")

Policy = Callable[[fx.GraphModule], fx.GraphModule]

# A loss leaves its mark in the graph, and the piece that computes it adds it.
_library = torch.library.Library("taktline", "FRAGMENT")
_library.define("add_loss(Tensor loss) -> ()")
_library.impl("add_loss", lambda loss: None, "CompositeExplicitAutograd")
_LOSS = torch.ops.taktline.add_loss.default
has_side_effect(_LOSS)


def trace(
    module: nn.Module,
    args: Args,
    kwargs: Kwargs | None,
    spec: Mapping[str, SplitPoint],
    policy: Policy | None,
) -> fx.GraphModule:
    """The module's graph, in the mode that it is in; the module itself is left as it was."""
    if not isinstance(args, tuple):
        raise PartitionError(f"mb_args must be a tuple of arguments, not a {type(args).__name__}")
    with marked(module, spec), tracing():
        program = _export(module, args, kwargs)
    # Without guards: those would refuse micro-batches of another size even where they fit.
    traced = program.module(check_guards=False)
    if not isinstance(traced, fx.GraphModule):
        raise PartitionError(f"torch.export gave a {type(traced).__name__}, not a graph")
    require_outside(traced)
    traced = _with_losses(traced)
    if policy is not None:
        traced = policy(traced)
        if not isinstance(traced, fx.GraphModule):
            raise PartitionError(
                f"split_policy must return the GraphModule with its marks, not {traced!r}"
            )
    return traced


class _Recorder(Aside):
    """The aside of a forward that is traced."""

    def add(self, loss: torch.Tensor) -> None:
        """Leave a mark."""
        _LOSS(loss)


@contextmanager
def _recording() -> Iterator[None]:
    """Record what a forward adds; what it puts, it must get."""
    with _Recorder(0, {}) as aside:
        yield
    aside.finish()


def _with_losses(traced: fx.GraphModule) -> fx.GraphModule:
    """The graph, adding losses where it has marks."""
    for part in traced.modules():
        if isinstance(part, fx.GraphModule):
            marks = [node for node in part.graph.nodes if node.target is _LOSS]
            for node in marks:
                node.target = add_loss
            if marks:
                part.recompile()
    return traced


def _export(module: nn.Module, args: Args, kwargs: Kwargs | None) -> torch.export.ExportedProgram:
    """Export a module for any size of the batch, or for the one of the example if that fails."""
    # Here, because it loads the compiler.
    from torch.export import export

    try:
        with _recording():
            shapes = _any_batch(module, args, kwargs)
            program = export(module, args, kwargs, dynamic_shapes=shapes, strict=False)
            if not _has_guards(program):
                return program
    except Exception as error:
        # torch.export raises errors of any type over a size that it cannot follow. What is wrong
        # with the model itself is raised again below; otherwise only batches of other sizes are
        # lost, and the log says why.
        _log.info("traced for one size of batch: %s: %s", type(error).__name__, error)
    with _recording():
        try:
            return export(module, args, kwargs, strict=False)
        except Exception as error:
            reason = str(error).strip() or type(error).__name__
            caches = getattr(getattr(module, "config", None), "use_cache", False)
            raise PartitionError(
                f"{reason}\n\ntorch.export cannot export {type(module).__name__} (see above). "
                f"{'Set model.config.use_cache = False. ' if caches else ''}Change what it "
                "stumbles over, or cut the model with taktline.split.by_names, which does not "
                "trace it, or by hand"
            ) from error


def _any_batch(module: nn.Module, args: Args, kwargs: Kwargs | None) -> Any:
    """What lets torch.export know that the first dimension of the tensors is that of one batch."""
    from torch.export import Dim, ShapesCollection

    tensors = [
        leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
    ]
    sizes = [tensor.shape[0] for tensor in tensors if tensor.ndim]
    batch, shapes = Dim("batch"), ShapesCollection()
    for tensor in tensors:
        if tensor.ndim and tensor.shape[0] == sizes[0]:
            shapes[tensor] = {0: batch}
    return shapes.dynamic_shapes(module, args, kwargs)


def _has_guards(program: torch.export.ExportedProgram) -> bool:
    """Whether the trace holds for some sizes only: it went a way that depends on them."""
    from sympy import true

    tensors = (node.meta.get("val") for node in program.graph.nodes)
    sizes: list[Any] = [
        tensor.shape[dim]
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
        for dim in batch_dims(tensor)
    ]
    guards = [guard.expr for guard in sizes[0].node.shape_env.guards] if sizes else []
    symbols = sorted(set().union(*(guard.free_symbols for guard in guards)), key=str)
    # All of them are the one batch, so what just says that they are equal always holds.
    one = dict.fromkeys(symbols, next(iter(symbols), None))
    return any(guard.subs(one) is not true for guard in guards)


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """A module in training or evaluation; afterwards each part is as it was."""
    before = {part: part.training for part in module.modules()}
    try:
        module.train(training)
        yield
    finally:
        module.train(before[module])  # a traced stage changes its graph there
        for part, mode in before.items():
            part.training = mode
