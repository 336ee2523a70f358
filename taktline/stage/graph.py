"""The autograd graph of a stage's forward, as far as its backward goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

__all__ = ["LEAF", "Graph", "Node"]

Node = Any
"""A node of the autograd graph; torch has no public type for them that knows their fields."""

LEAF: Any = type(get_gradient_edge(torch.zeros(0, requires_grad=True)).node)
# Marks in the shape of a graph, apart from all slots.
_NOWHERE, _NEXT = -1, -2


class Graph:
    """All nodes that the roots reach, numbered as they are found: their slots."""

    def __init__(self, roots: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self.nodes: list[Node] = []
        self.shape: list[int] = []
        """The slots of the roots, then those that each node leads to, with marks between."""
        self.roots = {root.grad_fn for root in roots}
        # What lies behind an input that is no leaf belongs to others.
        ends = {x.grad_fn for x in inputs if x.grad_fn is not None}
        slots: dict[Node | None, int] = {None: _NOWHERE}
        edges: Any = [(root.grad_fn, 0) for root in roots]
        nodes, shape = self.nodes, self.shape
        position = 0
        while True:
            for child, _ in edges:
                slot = slots.get(child)
                if slot is None:
                    slot = slots[child] = len(nodes)
                    nodes.append(child)
                shape.append(slot)
            shape.append(_NEXT)
            if position == len(nodes):
                break
            node = nodes[position]
            leaf = type(node) is LEAF  # leads nowhere
            edges = () if leaf else ((None, 0),) if node in ends else node.next_functions
            position += 1

    def consumers(self) -> dict[Node, list[tuple[Node, int]]]:
        """Who leads to each node, and by which edge."""
        found: dict[Node, list[tuple[Node, int]]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for edge, (child, _) in enumerate(node.next_functions):
                if child in found:
                    found[child].append((node, edge))
        return found
