"""What a trace was made with is part of it: the first piece checks that it gets the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from taktline.errors import PartitionError
from taktline.split.traced.sizes import batch_dims

__all__ = ["add_checks", "check_batch", "check_constant", "check_shape"]


_UNKNOWN = object()


def add_checks(graph: fx.Graph, arguments: Sequence[fx.Node]) -> None:
    """Let a graph check its arguments."""
    batch: dict[str, fx.Node] = {}
    for argument in arguments:
        traced = argument.meta.get("val", _UNKNOWN)
        if isinstance(traced, torch.Tensor):
            dims = batch_dims(traced)
            shape = [None if dim in dims else size for dim, size in enumerate(traced.shape)]
            graph.call_function(check_shape, (argument, argument.name, shape))
            if dims:
                batch[argument.name] = argument
        elif traced is None or isinstance(traced, (bool, int, float, str)):
            graph.call_function(check_constant, (argument, argument.name, traced))
    if len(batch) > 1:
        graph.call_function(check_batch, (list(batch), list(batch.values())))


def check_constant(value: object, name: str, traced: object) -> None:
    """Raise if an argument that is no tensor is not what it was in the trace."""
    if value is not traced and (isinstance(value, torch.Tensor) or value != traced):
        told = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise PartitionError(
            f"{name} is {told}, but the pipeline was traced with {traced!r}, which is part of "
            "it now; call pipeline() with what you need"
        )


def check_shape(value: torch.Tensor, name: str, traced: Sequence[int | None]) -> None:
    """Raise if a tensor has another shape: sizes may be constants of the trace, unseen.

    None is the batch, of any size but 1: a trace takes for granted that it is not.
    """
    if not isinstance(value, torch.Tensor):
        return
    shape = list(value.shape)
    fits = len(shape) == len(traced) and all(
        size == known if known is not None else size > 1
        for size, known in zip(shape, traced, strict=True)
    )
    if not fits:
        listed = ", ".join("2 or more" if known is None else str(known) for known in traced)
        raise PartitionError(
            f"{name} has the shape {shape}, but the pipeline was traced for [{listed}], and sizes "
            "are part of it; make every micro-batch of that size, or call pipeline() with an "
            "example of the size that you need"
        )


def check_batch(names: Sequence[str], values: Sequence[torch.Tensor]) -> None:
    """Raise if tensors that had one batch in the trace have not."""
    sizes = [value.shape[0] for value in values]
    for name, size in zip(names, sizes, strict=True):
        if size != sizes[0]:
            raise PartitionError(
                f"{names[0]} has {sizes[0]} along dimension 0, but {name} {size}; in the trace "
                "they were the same, so they are taken for one batch: make them the same, or call "
                "pipeline() with an example in which they differ"
            )
