"""The autograd graph of a stage's forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

Node = Any
"""A node of the autograd graph; torch has no public type with all its fields."""

LEAF: Any = type(get_gradient_edge(torch.zeros(0, requires_grad=True)).node)
# The slot of an edge to nothing; the edge count of a node outside of the stage.
_NOTHING, _FOREIGN = -1, -1


class Shape(NamedTuple):
    """The types of a graph's nodes, and its edges."""

    roots: int
    kinds: tuple[type, ...]
    edges: tuple[int, ...]
    """The slot at the end of each edge: of edges to the roots, then of those of each node."""
    steps: tuple[tuple[int, int], ...]
    """For each inner node: the first edge to it, and the number of edges from it."""
    first: tuple[int, ...]
    """The first edge to each node."""

    def follow(
        self, roots: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> list[Node] | None:
        """The nodes of a graph by their slots; None if it has another shape.

        Quicker than a new :class:`Graph`. Only where inputs are leaves, so that the graph ends with
        the stage.
        """
        if len(roots) != self.roots:
            return None
        for x in inputs:
            if not x.is_leaf:
                return None
        ends: list[Node] = [root.grad_fn for root in roots]
        for edge, count in self.steps:
            node = ends[edge]
            if node is None:
                return None
            onward = node.next_functions
            if len(onward) != count:
                return None
            ends += [end for end, _ in onward]
        nodes = [ends[edge] for edge in self.first]
        if len(set(nodes)) < len(nodes) or tuple(map(type, nodes)) != self.kinds:
            return None
        nodes.append(None)  # has the slot _NOTHING
        return nodes if [nodes[slot] for slot in self.edges] == ends else None


class Graph:
    """All nodes that the roots reach; a node's slot is its place in the order of discovery."""

    def __init__(self, roots: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self.nodes: list[Node] = []
        self.roots = {root.grad_fn for root in roots}
        # Nodes behind an input that is no leaf belong to other stages.
        ends = {x.grad_fn for x in inputs if x.grad_fn is not None}
        slots: dict[Node | None, int] = {None: _NOTHING}
        edges: list[int] = []
        steps: list[tuple[int, int]] = []
        first: list[int] = []

        def lead(onward: Sequence[tuple[Node | None, int]]) -> None:
            for child, _ in onward:
                if child not in slots:
                    slots[child] = len(self.nodes)
                    self.nodes.append(child)
                    first.append(len(edges))
                edges.append(slots[child])

        lead([(root.grad_fn, 0) for root in roots])
        for slot, node in enumerate(self.nodes):  # the list grows meanwhile
            if node in ends:
                steps.append((first[slot], _FOREIGN))
            elif type(node) is not LEAF:
                steps.append((first[slot], len(node.next_functions)))
                lead(node.next_functions)
        kinds = tuple(map(type, self.nodes))
        self.shape = Shape(len(roots), kinds, tuple(edges), tuple(steps), tuple(first))

    def leading_to(self, slots: Iterable[int]) -> set[Node]:
        """The nodes in some slots, and all nodes that lead to them."""
        found: set[Node] = set()
        waiting = [self.nodes[slot] for slot in slots]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += [consumer for consumer, _ in self.consumers[node]]
        return found

    @cached_property
    def consumers(self) -> dict[Node, list[tuple[Node, int]]]:
        """The nodes that lead to each node, with the number of the edge."""
        found: dict[Node, list[tuple[Node, int]]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for edge, (child, _) in enumerate(node.next_functions):
                if child in found:
                    found[child].append((node, edge))
        return found
