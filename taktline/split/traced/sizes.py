"""The size of a batch in a trace: each stage reads it off a tensor that it takes anyway.

A trace asks for it once, and uses it everywhere::

    n = size(x, 0)               stage 0: x -> a
    a = view(f(x), [n, 6])
    ---------
    b = view(g(a), [n, 2, 3])    stage 1: a -> view(g(a), [size(a, 0), 2, 3])
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["batch_dims", "read_locally"]

_SIZE = torch.ops.aten.sym_size.int
_ARITHMETIC = {operator.add, operator.floordiv, operator.mul, operator.sub}


def batch_dims(tensor: torch.Tensor) -> list[int]:
    """The dimensions along which a traced tensor may have any size."""
    return [dim for dim, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt)]


def read_locally(
    graph: fx.Graph, stages: dict[fx.Node, int], crossing: Sequence[Sequence[fx.Node]]
) -> None:
    """Let stages find out sizes themselves, as far as what they take shows them."""
    known: dict[tuple[fx.Node, int], fx.Node | None] = {}
    for node in list(graph.nodes):
        stage = stages.get(node, 0)
        for size in node.all_input_nodes:
            if _is_size(size) and stages[size] < stage:
                made = _local(size, stage, node, crossing[stage - 1], known)
                if made is not None:
                    node.replace_input_with(size, made)
    for (_, stage), made in known.items():
        if made is not None:
            stages[made] = stage


def _is_size(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt)


def _local(
    size: fx.Node,
    stage: int,
    user: fx.Node,
    taken: Sequence[fx.Node],
    known: dict[tuple[fx.Node, int], fx.Node | None],
) -> fx.Node | None:
    """The node of a stage that returns a size of an earlier one; None if it cannot."""
    if (size, stage) in known:
        return known[size, stage]
    made = None
    graph = user.graph
    place = _place(size, taken)
    if place is not None:
        with graph.inserting_before(user):
            made = graph.call_function(_SIZE, place)
    elif size.target in _ARITHMETIC:
        inputs = {
            part: _local(part, stage, user, taken, known)
            for part in size.all_input_nodes
            if _is_size(part)
        }
        if len(inputs) == len(size.all_input_nodes) and None not in inputs.values():
            with graph.inserting_before(user):
                made = graph.node_copy(size, lambda part: inputs[part] or part)
    if made is not None:
        made.meta = dict(size.meta)
    known[size, stage] = made
    return made


def _place(node: fx.Node, taken: Sequence[fx.Node]) -> tuple[fx.Node, int] | None:
    """A tensor and its dimension that has a size."""
    wanted = node.meta["val"].node.expr
    for value in taken:
        tensor = value.meta.get("val")
        if isinstance(tensor, torch.Tensor):
            for dim in batch_dims(tensor):
                size: Any = tensor.shape[dim]
                if size.node.expr == wanted:
                    return value, dim
    return None
