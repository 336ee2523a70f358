"""The shapes of a trace: stages read the size of a batch locally, and the first one checks it.

A trace reads the size of the batch once, and uses it everywhere. Each stage reads it off a tensor
that it gets anyway::

    n = size(x, 0)               stage 0: x -> a
    a = view(f(x), [n, 6])
    ---------
    b = view(g(a), [n, 2, 3])    stage 1: a -> view(g(a), [size(a, 0), 2, 3])
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from taktline.errors import PartitionError

_SIZE = torch.ops.aten.sym_size.int
_ARITHMETIC = {operator.add, operator.floordiv, operator.mul, operator.sub}
_UNKNOWN = object()


def batch_dims(tensor: torch.Tensor) -> list[int]:
    """The dimensions along which a traced tensor may have any size."""
    return [dim for dim, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt)]


def read_sizes_locally(
    graph: fx.Graph, stages: dict[fx.Node, int], crossing: Sequence[Sequence[fx.Node]]
) -> None:
    """Let each stage read sizes off the tensors that it gets, as far as possible."""
    begins = {stage: node for node, stage in reversed(stages.items())}

    @cache
    def local(size: fx.Node, stage: int) -> fx.Node | None:
        """A node of a stage that returns a size of an earlier one; None if there is no way."""
        place = _find_dimension(size, crossing[stage - 1])
        parts: dict[fx.Node, fx.Node | None] = {}
        if place is None and size.target in _ARITHMETIC:
            parts = {p: local(p, stage) if _is_size(p) else None for p in size.all_input_nodes}
        if place is None and (not parts or None in parts.values()):
            return None
        with graph.inserting_before(begins[stage]):
            if place is not None:
                made = graph.call_function(_SIZE, place)
            else:
                made = graph.node_copy(size, lambda part: parts[part] or part)
        made.meta, stages[made] = dict(size.meta), stage
        return made

    for node in list(graph.nodes):
        stage = stages.get(node, 0)
        for size in node.all_input_nodes:
            if _is_size(size) and stages[size] < stage and (made := local(size, stage)):
                node.replace_input_with(size, made)


def _is_size(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt)


def _find_dimension(node: fx.Node, taken: Sequence[fx.Node]) -> tuple[fx.Node, int] | None:
    """A tensor and the dimension of it that has a size."""
    wanted = node.meta["val"].node.expr
    for value in taken:
        tensor = value.meta.get("val")
        if isinstance(tensor, torch.Tensor):
            for dim in batch_dims(tensor):
                size: Any = tensor.shape[dim]
                if size.node.expr == wanted:
                    return value, dim
    return None


def add_checks(graph: fx.Graph, arguments: Sequence[fx.Node]) -> None:
    """Let a graph check that its arguments are like those of the trace."""
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
    """Raise if an argument that is not a tensor differs from that of the trace."""
    if value is not traced and (isinstance(value, torch.Tensor) or value != traced):
        found = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise PartitionError(
            f"{name} is {found}, but the pipeline was traced with {traced!r}, which is fixed now; "
            "call pipeline() with what you need"
        )


def check_shape(value: torch.Tensor, name: str, traced: Sequence[int | None]) -> None:
    """Raise if a tensor has another shape: sizes may be constants of the trace.

    None is the batch, of any size but 1: a trace relies on that.
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
            "are fixed; make every micro-batch of that size, or call pipeline() with an example of "
            "the size that you need"
        )


def check_batch(names: Sequence[str], values: Sequence[torch.Tensor]) -> None:
    """Raise if tensors that had the same batch in the trace have different ones."""
    sizes = [value.shape[0] for value in values]
    for name, size in zip(names, sizes, strict=True):
        if size != sizes[0]:
            raise PartitionError(
                f"{names[0]} has {sizes[0]} along dimension 0, but {name} {size}; they were equal "
                "in the trace, so they must be sizes of one batch: make them equal, or call "
                "pipeline() with an example in which they differ"
            )
