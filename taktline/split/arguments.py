"""What a trace was made with is part of it: the first piece checks that it gets the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from taktline.errors import PartitionError

__all__ = ["add_check", "check_constant", "check_shape"]


def add_check(graph: fx.Graph, argument: fx.Node) -> None:
    """Let a graph check one of its arguments."""
    if "val" not in argument.meta:
        return
    traced = argument.meta["val"]
    if isinstance(traced, torch.Tensor):
        graph.call_function(check_shape, (argument, argument.name, list(traced.shape)))
    elif traced is None or isinstance(traced, (bool, int, float, str)):
        graph.call_function(check_constant, (argument, argument.name, traced))


def check_constant(value: object, name: str, traced: object) -> None:
    """Raise if an argument that is no tensor is not what it was in the trace."""
    if value is not traced and (isinstance(value, torch.Tensor) or value != traced):
        told = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise PartitionError(
            f"{name} is {told}, but the pipeline was traced with {traced!r}, which is part of "
            "it now; call pipeline() with what you need"
        )


def check_shape(value: torch.Tensor, name: str, traced: Sequence[int]) -> None:
    """Raise if a tensor has another shape: sizes may be constants of the trace, unseen."""
    if isinstance(value, torch.Tensor) and list(value.shape) != list(traced):
        raise PartitionError(
            f"{name} has the shape {list(value.shape)}, but the pipeline was traced with "
            f"{list(traced)}, and sizes are part of it; make every micro-batch of that size, or "
            "call pipeline() with an example of the size that you need"
        )
