"""Traces a module as one flat graph, with marks where it is cut."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.fx.node import has_side_effect

from taktline.errors import PartitionError
from taktline.side_values import Aside, add_loss
from taktline.split.arguments import Args, Kwargs, tensors_in
from taktline.split.traced.markers import SplitPoint, marked, require_outside, tracing
from taktline.split.traced.shapes import batch_dims

_log = logging.getLogger("taktline")

Policy = Callable[[fx.GraphModule], fx.GraphModule]

# A loss leaves a mark in the graph, and the stage that computes the loss adds it.
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
    """The module's graph in its present mode; the module stays unchanged."""
    if not isinstance(args, tuple):
        raise PartitionError(f"mb_args must be a tuple of arguments, not {type(args).__name__}")
    with _requiring_own_assignments(module), marked(module, spec), tracing():
        program = _export(module, args, kwargs)
    # Guards would refuse micro-batches of other sizes even if the graph fits them.
    traced: Any = program.module(check_guards=False)
    require_outside(traced)
    traced = _with_losses(traced)
    if policy is not None:
        traced = policy(traced)
        if not isinstance(traced, fx.GraphModule):
            raise PartitionError(
                f"split_policy must return the GraphModule with its marks, not {traced!r}"
            )
    return traced


@contextmanager
def _requiring_own_assignments(module: nn.Module) -> Iterator[None]:
    """Raise if the forward assigns buffers of submodules: torch.export drops that silently."""
    assigned: set[str] = set()
    forward = module.forward

    @wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        before = dict(module.named_buffers())
        output = forward(*args, **kwargs)
        after = dict(module.named_buffers())
        assigned.update(name for name in before if after.get(name) is not before[name])
        return output

    with patch.object(module, "forward", watched):
        yield
    dropped = sorted(name for name in assigned if "." in name)
    if dropped:
        raise PartitionError(
            f"the forward assigns {dropped[0]!r}, a buffer of a submodule, which torch.export does "
            "not trace; change it in place, with copy_()"
        )


class _TracedAside(Aside):
    """Records the losses of a forward that is traced."""

    def add(self, loss: torch.Tensor) -> None:
        """Leave a mark in the graph."""
        _LOSS(loss)


@contextmanager
def _recording() -> Iterator[None]:
    """Record the losses of a forward; raise if a skip is never taken."""
    with _TracedAside(0, {}) as aside:
        yield
    aside.finish()


def _with_losses(traced: fx.GraphModule) -> fx.GraphModule:
    """The graph, with calls of ``add_loss`` instead of marks."""
    for part in traced.modules():
        if isinstance(part, fx.GraphModule):
            marks = [node for node in part.graph.nodes if node.target is _LOSS]
            for node in marks:
                node.target = add_loss
            if marks:
                part.recompile()
    return traced


def _export(module: nn.Module, args: Args, kwargs: Kwargs | None) -> torch.export.ExportedProgram:
    """Export a module for any size of the batch, or else for that of the example."""
    # Here, because it loads the compiler.
    from torch.export import export

    try:
        with _recording():
            shapes = _any_batch(module, args, kwargs)
            program = export(module, args, kwargs, dynamic_shapes=shapes, strict=False)
            if not _has_guards(program):
                return program
    except Exception as error:
        # torch.export raises errors of any type if it cannot trace a size. An error of the model
        # itself is raised again below.
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
                "refuses, or cut the model with taktline.split.by_names, which does not trace it, "
                "or by hand"
            ) from error


def _any_batch(module: nn.Module, args: Args, kwargs: Kwargs | None) -> Any:
    """Dynamic shapes for torch.export: the first dimension of tensors is that of one batch."""
    from torch.export import Dim, ShapesCollection

    tensors = tensors_in((args, kwargs))
    sizes = [tensor.shape[0] for tensor in tensors if tensor.ndim]
    batch, shapes = Dim("batch"), ShapesCollection()
    for tensor in tensors:
        if tensor.ndim and tensor.shape[0] == sizes[0]:
            shapes[tensor] = {0: batch}
    return shapes.dynamic_shapes(module, args, kwargs)


def _has_guards(program: torch.export.ExportedProgram) -> bool:
    """Whether the trace is valid for some sizes alone, as a branch depends on them."""
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
    # All symbols are the one batch, so guards that they are equal always hold.
    one = dict.fromkeys(symbols, next(iter(symbols), None))
    return any(guard.subs(one) is not true for guard in guards)


@contextmanager
def in_mode(*modules: nn.Module, training: bool) -> Iterator[None]:
    """Put modules into training or evaluation; at the end each part is as before."""
    before = {part: part.training for module in modules for part in module.modules()}
    try:
        for module in modules:
            module.train(training)
        yield
    finally:
        for module in modules:
            module.train(before[module])  # a traced stage changes its graph there
        for part, mode in before.items():
            part.training = mode
