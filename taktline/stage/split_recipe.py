"""Recipes of the split backward: which products W computes, found once for a shape of graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from taktline.private import lacking
from taktline.stage.autograd_engine import is_own_hook
from taktline.stage.autograd_graph import LEAF, Graph, Node, Shape


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


class Inside(NamedTuple):
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
    weights: tuple[torch.Tensor, ...] = ()
    """The leaves whose gradients W computes."""
    leaves: tuple[torch.Tensor, ...] = ()
    """The leaves whose gradients I computes, besides the stage's inputs."""
    edges: tuple[int, ...] = ()
    """The slots of products that the engine reaches only if asked to."""
    whole: bool = False
    """Whether I computes all gradients."""
    compiled: tuple[Inside, ...] = ()

    def fits(self, nodes: Sequence[Node], inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a graph of the same shape has the same leaves and products."""
        for slot, leaf in self.ends:
            here = nodes[slot].variable
            if here is not leaf and (leaf is not None or not is_among(here, inputs)):
                return False
        for product in self.products:
            if _hooked(product.weight) or _hindrance(product.kind, nodes[product.slot]):
                return False
        for inside in self.compiled:
            for leaf in inside.leaves.values():
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
    graph: Graph, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> tuple[Recipe, dict[torch.Tensor, str]]:
    """The recipe for a graph, and the reasons of weights whose gradients I computes."""
    known, given = set(weights), set(inputs)
    ends = [
        (slot, None if node.variable in given else node.variable)
        for slot, node in enumerate(graph.nodes)
        if type(node) is LEAF
    ]

    def whole(reason: str) -> tuple[Recipe, dict[torch.Tensor, str]]:
        recipe = Recipe(graph.shape, tuple(ends), whole=True)
        return recipe, dict.fromkeys(weights, reason)

    if _UNSEEN is not None:
        return whole(_UNSEEN)
    if None in graph.roots:
        return whole("an output of the stage is one of its leaves")
    if any(node.name() == _REENTRANT for node in graph.nodes):
        return whole("re-entrant checkpointing does its backward at once")
    if any(leaf is not None and leaf not in known for _, leaf in ends):
        return whole("the graph reaches leaves outside of the stage")
    reasons: dict[torch.Tensor, str] = {}
    products: list[Product] = []
    later: list[torch.Tensor] = []
    slots = {node: slot for slot, node in enumerate(graph.nodes)}
    for slot, leaf in ends:
        if leaf is None:
            continue
        found = _uses(graph.consumers, graph.roots, graph.nodes[slot], leaf)
        if isinstance(found, str):
            reasons[leaf] = found
        else:
            products += [
                Product(slots[node], _KINDS[node.name()], chain, leaf) for node, chain in found
            ]
            later.append(leaf)
    reached = graph.leading_to(slot for slot, leaf in ends if leaf is None or leaf in reasons)
    edges = [product.slot for product in products if graph.nodes[product.slot] not in reached]
    recipe = Recipe(
        graph.shape,
        tuple(ends),
        tuple(products),
        tuple(later),
        tuple(reasons),
        tuple(edges),
        compiled=tuple(
            _inside(graph, slot, reasons)
            for slot, node in enumerate(graph.nodes)
            if node.name() == _COMPILED
        ),
    )
    return recipe, reasons


def _inside(graph: Graph, slot: int, leaves: Collection[torch.Tensor]) -> Inside:
    edges = graph.nodes[slot].next_functions
    alone = {
        edge: node.variable
        for edge, (node, _) in enumerate(edges)
        if type(node) is LEAF and len(graph.consumers[node]) == 1
    }
    found = {
        edge: leaf
        for edge, leaf in alone.items()
        if leaf in leaves and not (_hooked(leaf) or _is_node_hooked(edges[edge][0]))
    }
    return Inside(slot, len(edges), found)


def _uses(
    consumers: Mapping[Node, list[tuple[Node, int]]],
    roots: set[Node],
    leaf: Node,
    weight: torch.Tensor,
) -> list[tuple[Node, tuple[str, ...]]] | str:
    """All products with a weight, each with the chain to it; or why W cannot compute them."""
    # The engine chooses the form of a product by the strides, which for 1 × 1 are ambiguous.
    plain = weight.dim() == 2 and weight.stride() == (weight.size(1), 1) and weight.numel() != 1
    if not plain or weight.is_complex():
        return "no plain matrix"
    if _hooked(weight) or _is_node_hooked(leaf):
        return "it has hooks"
    found: list[tuple[Node, tuple[str, ...]]] = []
    order: list[tuple[int, int]] = []
    # Each node with the chain to the weight, and the node next to the weight.
    waiting: list[tuple[Node, tuple[str, ...], Node]] = [(leaf, (), None)]
    while waiting:
        here, chain, last = waiting.pop()
        if here in roots:
            return "an output of the stage shows it"
        for parent, edge in consumers[here]:
            name = parent.name()
            if name in (_TURN, _CAST) and name not in chain:
                waiting.append((parent, (name, *chain), last or parent))
            elif name not in _KINDS or edge != _KINDS[name].edge:
                return f"used in {name.removesuffix('0').removesuffix('Backward')}"
            elif reason := _lacking(_KINDS[name], parent) or _hindrance(_KINDS[name], parent):
                return reason
            else:
                found.append((parent, chain))
                order.append((parent._sequence_nr(), (last or parent)._sequence_nr()))
    if len(found) > 1 and any(_CAST in chain for _, chain in found):
        return "cast, and used more than once"
    # The engine sums in the order of the nodes next to the weight, W in that of the products. Two
    # terms have the same sum in any order; products with the same last node are in order.
    lasts = [last for _, last in sorted(order)]
    if len(found) > 2 and len(set(lasts)) > 1 and lasts != sorted(set(lasts)):
        return "used several times, in an order of its own"
    return found


def _lacking(kind: _Kind, product: Node) -> str | None:
    """Which attribute of the node the installed torch lacks."""
    names = [kind.factor, kind.raw, "_sequence_nr", *(["_saved_alpha"] if kind.scaled else [])]
    return lacking(type(product), *names, feature=_FEATURE)


def _hindrance(kind: _Kind, product: Node) -> str | None:
    """Why W cannot compute a product; None if it can."""
    if getattr(product, kind.raw).unpack_hook is not None:
        return "checkpointed, or its activations are kept elsewhere"
    return "in a scaled product" if kind.scaled and product._saved_alpha != 1 else None


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
