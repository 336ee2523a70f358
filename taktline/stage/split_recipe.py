"""Recipes of the split backward: which products W computes, found once for a shape of graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from taktline.private import lacking
from taktline.stage.autograd_engine import is_own_hook

Node = Any
"""A node of the autograd graph; torch has no public type with all its fields."""

_LEAF: Any = type(get_gradient_edge(torch.zeros(0, requires_grad=True)).node)
# The slot of an edge to nothing; the edge count of a node outside of the stage.
_NOTHING, _FOREIGN = -1, -1


class _Kind(NamedTuple):
    """A kind of product."""

    edge: int
    """The edge that leads to the weight."""
    factor: str
    """The node's attribute with the other factor."""
    raw: str
    """The same before hooks on saved tensors."""
    scaled: bool
    """Whether the node may scale the product."""


_KINDS = {
    "AddmmBackward0": _Kind(2, "_saved_mat1", "_raw_saved_mat1", True),
    "MmBackward0": _Kind(1, "_saved_self", "_raw_saved_self", False),
}
_TURN, _CAST = "TBackward0", "ToCopyBackward0"
_REENTRANT = "CheckpointFunctionBackward"
_COMPILED = "CompiledFunctionBackward"
_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"
_FEATURE = "a backward in halves"
_UNSEEN = lacking(torch.Tensor, *_HOOKS, "_version", feature=_FEATURE)
"""Why no backward is split; None if torch has what that needs of tensors."""


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

        Quicker than a new :class:`GradGraph`. Only where inputs are leaves, so that the graph ends
        with the stage.
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


class GradGraph:
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
            elif type(node) is not _LEAF:
                steps.append((first[slot], len(node.next_functions)))
                lead(node.next_functions)
        kinds = tuple(map(type, self.nodes))
        self.shape = Shape(len(roots), kinds, tuple(edges), tuple(steps), tuple(first))

    @cached_property
    def consumers(self) -> dict[Node, list[tuple[Node, int]]]:
        """The nodes that lead to each node, with the number of the edge."""
        found: dict[Node, list[tuple[Node, int]]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for edge, (child, _) in enumerate(node.next_functions):
                if child in found:
                    found[child].append((node, edge))
        return found

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


@dataclass(frozen=True, slots=True)
class Product:
    """One product that W computes: the slot of its node, and the chain from it to the weight."""

    slot: int
    kind: _Kind
    chain: tuple[str, ...]
    weight: torch.Tensor

    def compute(self, factor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the weight, by the same product as the engine's."""
        if gradient.requires_grad:  # it comes from the caller of the backward
            gradient = gradient.detach()
        if self.chain == (_TURN,):  # the usual case
            return gradient.t().mm(factor)
        product = gradient.t().mm(factor) if _TURN in self.chain else factor.t().mm(gradient)
        return product.to(self.weight) if _CAST in self.chain else product


class CompiledNode(NamedTuple):
    """A compiled node, which can leave out the gradients of leaves by itself."""

    slot: int
    edges: int
    """The number of its edges."""
    leaves: dict[int, torch.Tensor]
    """The leaves that only this node leads to, by edge."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to split graphs of one shape."""

    shape: Shape
    ends: tuple[tuple[int, torch.Tensor | None], ...]
    """The leaves of the graph with their slots; None for an input of the stage."""
    products: tuple[Product, ...] = ()
    leaves: tuple[torch.Tensor, ...] = ()
    """The leaves whose gradients I computes, besides the stage's inputs."""
    edges: tuple[int, ...] = ()
    """The slots of products that the engine reaches only if asked to."""
    compiled: tuple[CompiledNode, ...] = ()
    whole: str = ""
    """Why I computes all gradients; empty if the graph can be split."""

    def fits(self, nodes: Sequence[Node], inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a graph of the same shape has the same leaves and products."""
        for slot, leaf in self.ends:
            here = nodes[slot].variable
            if here is not leaf and (leaf is not None or not is_among(here, inputs)):
                return False
        for product in self.products:
            if _hooked(product.weight) or not _is_plain(product.kind, nodes[product.slot]):
                return False
        for node in self.compiled:
            for leaf in node.leaves.values():
                if (leaf._backward_hooks or leaf._post_accumulate_grad_hooks) and _hooked(leaf):
                    return False
        return True


def is_among(tensor: object, others: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor is one of these objects."""
    for other in others:  # noqa: SIM110 -- any() would take three times as long
        if other is tensor:
            return True
    return False


def learn(
    graph: GradGraph, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> Recipe:
    """The recipe for a graph: W computes the products of weights that have no other use."""
    known, given = set(weights), set(inputs)
    ends = tuple(
        (slot, None if node.variable in given else node.variable)
        for slot, node in enumerate(graph.nodes)
        if type(node) is _LEAF
    )
    reason = _UNSEEN or ""
    if None in graph.roots:
        reason = "an output of the stage is one of its parameters"
    elif any(node.name() == _REENTRANT for node in graph.nodes):
        reason = "re-entrant checkpointing runs its backward at once; pass use_reentrant=False"
    elif any(leaf is not None and leaf not in known for _, leaf in ends):
        reason = "the graph reaches tensors that are no parameters or inputs of the stage"
    if reason:
        return Recipe(graph.shape, ends, whole=reason)
    products: list[Product] = []
    early: list[torch.Tensor] = []
    slots = {node: slot for slot, node in enumerate(graph.nodes)}
    for slot, leaf in ends:
        if leaf is not None:
            found = _products(graph, graph.nodes[slot], leaf)
            products += [Product(slots[node], _KINDS[node.name()], c, leaf) for node, c in found]
            early += [] if found else [leaf]
    reached = graph.leading_to(s for s, leaf in ends if leaf is None or leaf in set(early))
    return Recipe(
        graph.shape,
        ends,
        tuple(products),
        tuple(early),
        tuple(p.slot for p in products if graph.nodes[p.slot] not in reached),
        tuple(
            _compiled_node(graph, slot, set(early))
            for slot, node in enumerate(graph.nodes)
            if node.name() == _COMPILED
        ),
    )


def _compiled_node(graph: GradGraph, slot: int, leaves: Collection[torch.Tensor]) -> CompiledNode:
    edges = graph.nodes[slot].next_functions
    found = {
        edge: node.variable
        for edge, (node, _) in enumerate(edges)
        if type(node) is _LEAF
        and len(graph.consumers[node]) == 1
        and node.variable in leaves
        and not (_hooked(node.variable) or _is_node_hooked(node))
    }
    return CompiledNode(slot, len(edges), found)


def _products(
    graph: GradGraph, leaf: Node, weight: torch.Tensor
) -> list[tuple[Node, tuple[str, ...]]]:
    """All products with a weight, each with the chain to it; none if W cannot compute all uses."""
    # The engine chooses the form of a product by the strides, which for 1 × 1 are ambiguous.
    plain = weight.dim() == 2 and weight.stride() == (weight.size(1), 1) and weight.numel() != 1
    if not plain or weight.is_complex() or _hooked(weight) or _is_node_hooked(leaf):
        return []
    found: list[tuple[Node, tuple[str, ...]]] = []
    order: list[tuple[int, int]] = []
    # Each node with the chain to the weight, and the node next to the weight.
    waiting: list[tuple[Node, tuple[str, ...], Node]] = [(leaf, (), None)]
    while waiting:
        here, chain, last = waiting.pop()
        if here in graph.roots:  # an output shows the weight
            return []
        for parent, edge in graph.consumers[here]:
            name, kind = parent.name(), _KINDS.get(parent.name())
            if name in (_TURN, _CAST) and name not in chain:
                waiting.append((parent, (name, *chain), last or parent))
            elif kind and kind.edge == edge and _is_known(kind, parent) and _is_plain(kind, parent):
                found.append((parent, chain))
                order.append((parent._sequence_nr(), (last or parent)._sequence_nr()))
            else:
                return []
    if len(found) > 1 and any(_CAST in chain for _, chain in found):
        return []
    # The engine sums in the order of the nodes next to the weight, W in that of the products. Two
    # terms have the same sum in any order; products with the same last node are in order.
    lasts = [last for _, last in sorted(order)]
    in_order = len(found) <= 2 or len(set(lasts)) == 1 or lasts == sorted(set(lasts))
    return found if in_order else []


def _is_plain(kind: _Kind, product: Node) -> bool:
    """Whether a product is not scaled, and its factor is kept as it was.

    It is not if the product is checkpointed, or its activations are kept elsewhere.
    """
    kept = getattr(product, kind.raw).unpack_hook is None
    return kept and not (kind.scaled and product._saved_alpha != 1)


def _is_known(kind: _Kind, product: Node) -> bool:
    """Whether the installed torch has the attributes of a product's node."""
    names = [kind.factor, kind.raw, "_sequence_nr", *(["_saved_alpha"] if kind.scaled else [])]
    return lacking(type(product), *names, feature=_FEATURE) is None


def _hooked(weight: torch.Tensor) -> bool:
    hooks: Mapping[int, Callable[..., object]] | None = weight._backward_hooks
    after: Mapping[int, Callable[..., object]] | None = weight._post_accumulate_grad_hooks
    return bool(hooks) or (bool(after) and not all(map(is_own_hook, after.values())))


def _is_node_hooked(node: Node) -> bool:
    """Whether the node of a weight has hooks; too slow to be asked in each step."""
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)  # the one way to the hooks of a node
        others = handle.hooks_dict_ref()
        handle.remove()
        if others:
            return True
    return False
