"""The split backward: I gives the gradients of a stage's inputs, W those of its weights.

What W can do later, and cheaply, are the matrix products of linear layers::

    forward    Y = X · Wᵀ + b          the graph:   Addmm ──▶ X
                                                     ├─────▶ b
    in I       dX = dY · W, db, and                  └─ T ──▶ W
               X and dY are put aside
    in W       dW = dYᵀ · X

So I is one pass of the engine over the graph, in which these products are left out, and after which
the graph is gone; of a micro-batch stay X and dY of each linear layer. All other gradients (norms,
biases, embeddings, convolutions, what is compiled or checkpointed) are due in I, once: the engine
computes them on the way. A weight is left out only if every use of it is such a product.

Finding the products means walking through the graph. What was found is remembered for a shape of
graph (a Recipe), and used again where shape and leaves are the same. That they are must be seen in
each graph: nothing but its edges tells whether a weight has one more use than before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.graph import GradientEdge

from taktline.errors import SplitError
from taktline.sharding import local
from taktline.stage.engine import accumulate, add_to_grad
from taktline.stage.graph import LEAF, Graph, Node, Shape

__all__ = ["Pending", "Splitter", "explain"]

# The products: the edge that leads to the weight, and where the other factor is saved.
_PRODUCTS = {
    "AddmmBackward0": (2, "_saved_mat1", "_raw_saved_mat1"),
    "MmBackward0": (1, "_saved_self", "_raw_saved_self"),
}
_TURN, _CAST = "TBackward0", "ToCopyBackward0"
_REENTRANT = "CheckpointFunctionBackward"
_REMEMBERED = 8


@dataclass(frozen=True, slots=True)
class _Product:
    """One product that W does: where its node is, and what lies between it and the weight."""

    slot: int
    name: str
    chain: tuple[str, ...]
    weight: torch.Tensor
    number: int
    """Of the weight, among those of the recipe."""

    @property
    def factor(self) -> str:
        """Where the node has saved the other factor."""
        return _PRODUCTS[self.name][1]

    def compute(self, factor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the weight, by the same product as the engine's."""
        if gradient.requires_grad:  # handed through from who asked for a backward
            gradient = gradient.detach()
        if self.chain == (_TURN,):  # the usual case
            return gradient.t().mm(factor)
        product = gradient.t().mm(factor) if _TURN in self.chain else factor.t().mm(gradient)
        return product.to(self.weight) if _CAST in self.chain else product


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to split graphs of one shape."""

    shape: Shape
    ends: tuple[tuple[int, torch.Tensor | None], ...]
    """The leaves of the graph by their slots; None stands for an input of the stage."""
    products: tuple[_Product, ...] = ()
    weights: tuple[torch.Tensor, ...] = ()
    """What gets its gradient in W."""
    leaves: tuple[torch.Tensor, ...] = ()
    """What gets its gradient in I, besides the stage's inputs."""
    edges: tuple[int, ...] = ()
    """The slots of products that the engine comes to only if it is told to."""
    whole: bool = False
    """Nothing can be left out: everything is due in I."""

    def fits(self, nodes: Sequence[Node], inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a graph of the same shape has the same leaves and products."""
        for slot, leaf in self.ends:
            here = nodes[slot].variable
            if here is not leaf and (leaf is not None or not _is_among(here, inputs)):
                return False
        for product in self.products:
            if _hooked(product.weight) or _hindrance(product.name, nodes[product.slot]):
                return False
        return True


class Pending:
    """What W has left to do for one micro-batch."""

    __slots__ = ("_factors", "_gradients", "_recipe", "_versions")

    def __init__(self, recipe: _Recipe, nodes: Sequence[Node]) -> None:
        """``nodes`` are those of the products."""
        self._recipe = recipe
        self._factors: list[torch.Tensor] = []
        # What the nodes are about to work on, in the order in which the engine comes to them.
        self._gradients: dict[int, tuple[torch.Tensor | None]] = {}
        for index, node in enumerate(nodes):
            self._factors.append(getattr(node, recipe.products[index].factor).detach())
            node.register_prehook(partial(self._gradients.__setitem__, index))
        self._versions = [factor._version for factor in self._factors]

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights that wait for their gradients."""
        return list(self._recipe.weights)

    def part_from(self, leaves: Sequence[torch.Tensor]) -> None:
        """Copy new gradients in the memory of those put aside: later ones are added to them."""
        aside = {_memory(g) for (g,) in self._gradients.values() if g is not None}
        for leaf in leaves:
            if leaf.grad is not None and (None in aside or _memory(leaf.grad) in (None, *aside)):
                leaf.grad = leaf.grad.clone()

    def run(self) -> None:
        """Do the products; those of one weight are summed first, in the engine's order."""
        if [factor._version for factor in self._factors] != self._versions:
            raise SplitError(
                "an input of a linear layer was changed in place between the backward for the "
                "inputs (I) and that for the weights (W)"
            )
        products, weights = self._recipe.products, self._recipe.weights
        totals: list[torch.Tensor | None] = [None] * len(weights)
        for index, (gradient,) in self._gradients.items():
            if gradient is None:
                continue
            product = products[index]
            value = product.compute(self._factors[index], gradient)
            known = totals[product.number]
            totals[product.number] = value if known is None else known + value
        for weight, total in zip(weights, totals, strict=True):
            if total is not None:
                add_to_grad(weight, total)
        # Who keeps an output keeps the graph, and with it what notes gradients here.
        self._factors, self._versions = [], []
        self._gradients.clear()


class Splitter:
    """Splits the backward of one stage, micro-batch by micro-batch."""

    def __init__(self) -> None:
        self._recipes: dict[Shape, _Recipe] = {}
        self._latest: _Recipe | None = None

    def run_input(
        self,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
    ) -> Pending | None:
        """I: gradients for the inputs and all that W does not do; None if W has nothing to do."""
        rest = [i for i, root in enumerate(roots) if not (root.is_leaf and _is_among(root, inputs))]
        if len(rest) == len(roots):
            return self._run_input(roots, gradients, inputs, weights)
        # An output that is an input hands its gradient through, and is no part of the graph.
        passed = [i for i in range(len(roots)) if i not in rest]
        pending = None
        if rest:
            pending = self._run_input(
                [roots[i] for i in rest], [gradients[i] for i in rest], inputs, weights
            )
        for i in passed:
            before = roots[i].grad
            roots[i].grad = gradients[i] if before is None else before + gradients[i]
        return pending

    def _run_input(
        self,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
    ) -> Pending | None:
        recipe, nodes = self._recipe(roots, inputs, weights)
        if recipe.whole:
            accumulate(roots, gradients)
            return None
        found = [nodes[product.slot] for product in recipe.products]
        pending = Pending(recipe, found)
        edges = [GradientEdge(nodes[slot], 0) for slot in recipe.edges]
        new = [leaf for leaf in recipe.leaves if leaf.grad is None]
        accumulate(roots, gradients, (*inputs, *recipe.leaves, *edges))
        if new:
            pending.part_from(new)
        return pending if found else None

    def _recipe(
        self,
        roots: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
    ) -> tuple[_Recipe, Sequence[Node]]:
        """The recipe for a graph, with its nodes; most often it is that of the graph before."""
        recipe = self._latest
        if recipe is not None:
            nodes = recipe.shape.follow(roots, inputs)
            if nodes is not None and recipe.fits(nodes, inputs):
                return recipe, nodes
        graph = Graph(roots, inputs)
        recipe = self._recipes.get(graph.shape)
        if recipe is None or not recipe.fits(graph.nodes, inputs):
            recipe, _ = _learn(graph, inputs, weights)
            self._recipes.pop(graph.shape, None)
            self._recipes[graph.shape] = recipe
            if len(self._recipes) > _REMEMBERED:
                del self._recipes[next(iter(self._recipes))]
        self._latest = recipe
        return recipe, graph.nodes


def _is_among(tensor: object, others: Sequence[torch.Tensor]) -> bool:
    for other in others:  # noqa: SIM110 -- any() would take three times as long
        if other is tensor:
            return True
    return False


def _memory(tensor: torch.Tensor) -> int | None:
    """Where a tensor lies; None for one that only stands for another, such as a collective's."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except RuntimeError:
        return None


def _learn(
    graph: Graph, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> tuple[_Recipe, dict[torch.Tensor, str]]:
    """The recipe for a graph, and why each weight that is not left out is not."""
    known, given = set(weights), set(inputs)
    ends = [
        (slot, None if node.variable in given else node.variable)
        for slot, node in enumerate(graph.nodes)
        if type(node) is LEAF
    ]

    def whole(reason: str) -> tuple[_Recipe, dict[torch.Tensor, str]]:
        recipe = _Recipe(graph.shape, tuple(ends), whole=True)
        return recipe, dict.fromkeys(weights, reason)

    if None in graph.roots:
        return whole("an output of the stage is one of its leaves")
    if any(node.name() == _REENTRANT for node in graph.nodes):
        return whole("re-entrant checkpointing does its backward at once")
    if any(leaf is not None and leaf not in known for _, leaf in ends):
        return whole("the graph reaches leaves outside of the stage")
    reasons: dict[torch.Tensor, str] = {}
    products: list[_Product] = []
    later: list[torch.Tensor] = []
    slots = {node: slot for slot, node in enumerate(graph.nodes)}
    consumers = graph.consumers()
    for slot, leaf in ends:
        if leaf is None:
            continue
        found = _uses(consumers, graph.roots, graph.nodes[slot], leaf)
        if isinstance(found, str):
            reasons[leaf] = found
        else:
            products += [
                _Product(slots[node], node.name(), chain, leaf, len(later)) for node, chain in found
            ]
            later.append(leaf)
    reached = graph.leading_to(slot for slot, leaf in ends if leaf is None or leaf in reasons)
    edges = [product.slot for product in products if graph.nodes[product.slot] not in reached]
    recipe = _Recipe(
        graph.shape, tuple(ends), tuple(products), tuple(later), tuple(reasons), tuple(edges)
    )
    return recipe, reasons


def _uses(
    consumers: Mapping[Node, list[tuple[Node, int]]],
    roots: set[Node],
    leaf: Node,
    weight: torch.Tensor,
) -> list[tuple[Node, tuple[str, ...]]] | str:
    """Every product that a weight is a factor of; or why they cannot be left out."""
    # By its strides the engine chooses one of two forms of a product; for 1 × 1 they tell nothing.
    plain = weight.dim() == 2 and weight.stride() == (weight.size(1), 1) and weight.numel() != 1
    if not plain or weight.is_complex():
        return "no plain matrix"
    if _hooked(weight):
        return "it has hooks"
    found: list[tuple[Node, tuple[str, ...]]] = []
    order: list[tuple[int, int]] = []
    # Each with what lies between it and the weight, and the last before the weight.
    waiting: list[tuple[Node, tuple[str, ...], Node]] = [(leaf, (), None)]
    while waiting:
        here, chain, last = waiting.pop()
        if here in roots:
            return "an output of the stage shows it"
        for parent, edge in consumers[here]:
            name = parent.name()
            if name in (_TURN, _CAST) and name not in chain:
                waiting.append((parent, (name, *chain), last or parent))
            elif name not in _PRODUCTS or edge != _PRODUCTS[name][0]:
                return f"used in {name.removesuffix('0').removesuffix('Backward')}"
            elif (hindrance := _hindrance(name, parent)) is not None:
                return hindrance
            else:
                found.append((parent, chain))
                order.append((parent._sequence_nr(), (last or parent)._sequence_nr()))
    if len(found) > 1 and any(_CAST in chain for _, chain in found):
        return "cast, and used more than once"
    # The engine sums in the order of what comes last, W in that of the products. For two it is
    # the same, whatever the order; and for products that all share the last.
    lasts = [last for _, last in sorted(order)]
    if len(found) > 2 and len(set(lasts)) > 1 and lasts != sorted(set(lasts)):
        return "used several times, in an order of its own"
    return found


def _hindrance(name: str, product: Node) -> str | None:
    """Why a product cannot be left out."""
    if getattr(product, _PRODUCTS[name][2]).unpack_hook is not None:
        return "checkpointed, or its activations are kept elsewhere"
    return None if getattr(product, "_saved_alpha", 1) == 1 else "in a scaled product"


def _hooked(weight: torch.Tensor) -> bool:
    hooks: Mapping[int, Callable[..., object]] | None = weight._backward_hooks
    return bool(hooks) or bool(weight._post_accumulate_grad_hooks)


def explain(
    roots: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> dict[torch.Tensor, str]:
    """Why each weight gets its gradient in I; those that are missing here get it in W."""
    computed = [root for root in roots if not (root.is_leaf and _is_among(root, inputs))]
    recipe, reasons = _learn(Graph(computed, inputs), inputs, weights)
    later = set(recipe.weights)
    return {
        weight: reasons.get(weight, "not used here") for weight in weights if weight not in later
    }
