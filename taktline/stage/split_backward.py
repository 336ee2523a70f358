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

What is compiled is one node here, and knows by itself what to leave out: see ``compiled``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from taktline.errors import SplitError
from taktline.sharding import local
from taktline.stage.engine import accumulate, add_to_grad, add_to_grads
from taktline.stage.graph import Graph, Node, Shape
from taktline.stage.recipe import Recipe, is_among, learn

__all__ = ["Pending", "Splitter", "explain"]

_REMEMBERED = 8
"""For how many shapes of graphs there is a recipe at a time."""


class _Compiled(NamedTuple):
    """What a compiled node has left out."""

    weights: Sequence[torch.Tensor]
    held: list[Any]
    versions: Sequence[int]
    """Of the tensors that it holds."""
    run: Callable[[list[Any]], Sequence[Any]]


class Pending:
    """What W has left to do for one micro-batch."""

    __slots__ = ("_compiled", "_factors", "_gradients", "_recipe", "_versions")

    def __init__(self, recipe: Recipe, nodes: Sequence[Node]) -> None:
        """``nodes`` are those of the products."""
        self._recipe = recipe
        self._factors: list[torch.Tensor] = []
        # What the nodes are about to work on, in the order in which the engine comes to them.
        self._gradients: dict[int, tuple[torch.Tensor | None]] = {}
        for index, node in enumerate(nodes):
            self._factors.append(getattr(node, recipe.products[index].kind.factor).detach())
            node.register_prehook(partial(self._gradients.__setitem__, index))
        self._versions = _versions(self._factors)
        self._compiled: list[_Compiled] = []

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights that wait for their gradients."""
        return [*self._recipe.weights, *(w for part in self._compiled for w in part.weights)]

    def take_over(
        self,
        weights: Sequence[torch.Tensor],
        held: list[Any],
        run: Callable[[list[Any]], Sequence[Any]],
    ) -> None:
        """Compute these weights' gradients, too, from what a compiled node holds for them."""
        self._compiled.append(_Compiled(weights, held, _versions(held), run))

    def part_from(self, leaves: Sequence[torch.Tensor]) -> None:
        """Copy new gradients in the memory of those put aside: later ones are added to them."""
        aside = {_memory(g) for (g,) in self._gradients.values() if g is not None}
        aside |= {_memory(x) for part in self._compiled for x in _tensors(part.held)}
        for leaf in leaves:
            if leaf.grad is not None and (None in aside or _memory(leaf.grad) in (None, *aside)):
                leaf.grad = leaf.grad.clone()

    def run(self) -> None:
        """Do the products; those of one weight are summed first, in the engine's order."""
        if _versions(self._factors) != self._versions or any(
            _versions(part.held) != part.versions for part in self._compiled
        ):
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
        for part in self._compiled:
            with torch.no_grad():  # as inside of the engine
                add_to_grads(part.weights, part.run(part.held))
        # Who keeps an output keeps the graph, and with it what notes gradients here.
        self._factors, self._versions = [], []
        self._gradients.clear()
        self._compiled.clear()


class Splitter:
    """Splits the backward of one stage, micro-batch by micro-batch."""

    def __init__(self) -> None:
        self._recipes: dict[Shape, Recipe] = {}
        self._latest: Recipe | None = None

    def run_input(
        self,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
    ) -> Pending | None:
        """I: gradients for the inputs and all that W does not do; None if W has nothing to do."""
        rest = [i for i, root in enumerate(roots) if not (root.is_leaf and is_among(root, inputs))]
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
        for inside in recipe.compiled:
            nodes[inside.slot].put_off = pending, inside
        new = [leaf for leaf in recipe.leaves if leaf.grad is None]
        # The engine runs quicker if it is not told where to go.
        everywhere = not found and all(x.is_leaf for x in inputs)
        accumulate(roots, gradients, () if everywhere else (*inputs, *recipe.leaves, *edges))
        if new:
            pending.part_from(new)
        return pending if found or pending.weights else None

    def _recipe(
        self,
        roots: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
    ) -> tuple[Recipe, Sequence[Node]]:
        """The recipe for a graph, with its nodes; most often it is that of the graph before."""
        recipe = self._latest
        if recipe is not None:
            nodes = recipe.shape.follow(roots, inputs)
            if nodes is not None and recipe.fits(nodes, inputs):
                return recipe, nodes
        graph = Graph(roots, inputs)
        recipe = self._recipes.get(graph.shape)
        if recipe is None or not recipe.fits(graph.nodes, inputs):
            recipe, _ = learn(graph, inputs, weights)
            self._recipes.pop(graph.shape, None)
            self._recipes[graph.shape] = recipe
            if len(self._recipes) > _REMEMBERED:
                del self._recipes[next(iter(self._recipes))]
        self._latest = recipe
        return recipe, graph.nodes


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))


def _versions(values: Iterable[object]) -> list[int]:
    return [tensor._version for tensor in _tensors(values)]


def _memory(tensor: torch.Tensor) -> int | None:
    """Where a tensor lies; None for one that only stands for another, such as a collective's."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except RuntimeError:
        return None


def explain(
    roots: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> dict[torch.Tensor, str]:
    """Why each weight gets its gradient in I; those that are missing here get it in W."""
    computed = [root for root in roots if not (root.is_leaf and is_among(root, inputs))]
    recipe, reasons = learn(Graph(computed, inputs), inputs, weights)
    later = set(recipe.weights)
    return {
        weight: reasons.get(weight, "not used here") for weight in weights if weight not in later
    }
