"""The split backward: I computes the gradients of a stage's inputs, W those of its weights.

W computes the matrix products of linear layers, which can be put off cheaply::

    forward    Y = X · Wᵀ + b          the graph:   Addmm ──▶ X
                                                     ├─────▶ b
    in I       dX = dY · W, db, and                  └─ T ──▶ W
               X and dY are kept
    in W       dW = dYᵀ · X

I is one pass of the engine over the graph without these products. It frees the graph and keeps X
and dY of each linear layer. The engine computes all other gradients on the way: norms, biases,
embeddings, convolutions, checkpointed blocks. W computes the gradient of a weight only if every use
of the weight is such a product.

The products of a graph are remembered as a Recipe, and used again for graphs of the same shape and
leaves. Each graph is compared, since only its edges show whether a weight has one more use.

A compiled block is one node here, and decides itself what to leave out: see ``compiled``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from taktline.errors import SplitError
from taktline.stage.autograd_engine import accumulate, add_to_grad, memory_of
from taktline.stage.split_recipe import GradGraph, Node, Recipe, Shape, is_among, learn

_log = logging.getLogger("taktline")

_REMEMBERED = 8
"""The most recipes that are kept."""


class _Compiled(NamedTuple):
    """The gradients that a compiled node has left out."""

    weights: Sequence[torch.Tensor]
    held: list[Any]
    versions: Sequence[int]
    """The versions of the tensors in ``held``."""
    run: Callable[[Sequence[torch.Tensor], list[Any]], None]
    """Computes them from held values, and adds them to the weights."""


class Pending:
    """The work of W for one micro-batch."""

    __slots__ = ("_compiled", "_factors", "_gradients", "_recipe", "_versions")

    def __init__(self, recipe: Recipe, nodes: Sequence[Node]) -> None:
        """``nodes`` has the node of each product."""
        self._recipe = recipe
        self._factors: list[torch.Tensor] = []
        # The incoming gradients of the nodes, in the order in which the engine reaches them.
        self._gradients: dict[int, tuple[torch.Tensor | None]] = {}
        for index, node in enumerate(nodes):
            self._factors.append(getattr(node, recipe.products[index].kind.factor).detach())
            node.register_prehook(partial(self._gradients.__setitem__, index))
        self._versions = _versions(self._factors)
        self._compiled: list[_Compiled] = []

    @property
    def has_compiled(self) -> bool:
        """Whether a compiled node has left out gradients."""
        return bool(self._compiled)

    def take_over(
        self,
        weights: Sequence[torch.Tensor],
        held: list[Any],
        run: Callable[[Sequence[torch.Tensor], list[Any]], None],
    ) -> None:
        """Later, run a compiled node's function of weights and held values, too."""
        self._compiled.append(_Compiled(weights, held, _versions(held), run))

    def copy_shared(self, leaves: Sequence[torch.Tensor]) -> None:
        """Copy new gradients that share memory with kept values: later ones are added in place."""
        kept = {memory_of(g) for (g,) in self._gradients.values() if g is not None}
        held = (value for part in self._compiled for value in part.held)
        kept |= {memory_of(value) for value in held if isinstance(value, torch.Tensor)}
        for leaf in leaves:
            if leaf.grad is not None and (None in kept or memory_of(leaf.grad) in (None, *kept)):
                leaf.grad = leaf.grad.clone()

    def run(self) -> None:
        """Compute the products; those of one weight are summed first, in the engine's order."""
        if _versions(self._factors) != self._versions or any(
            _versions(part.held) != part.versions for part in self._compiled
        ):
            raise SplitError(
                "an input of a linear layer was changed in place between the backward for the "
                "inputs (I) and that for the weights (W)"
            )
        products, sums = self._recipe.products, dict[torch.Tensor, torch.Tensor]()
        gradients = {index: g for index, (g,) in self._gradients.items() if g is not None}
        last = {products[index].weight: index for index in gradients}
        for index, gradient in gradients.items():
            weight = products[index].weight
            value = products[index].compute(self._factors[index], gradient)
            sums[weight] = sums[weight] + value if weight in sums else value
            del value
            if index == last[weight]:  # added at once, so that its memory serves the next product
                add_to_grad(weight, sums.pop(weight))
        for part in self._compiled:
            part.run(part.weights, part.held)
        # A kept output keeps the graph, whose hooks keep this object.
        self._factors, self._versions = [], []
        self._gradients.clear()
        self._compiled.clear()


class Splitter:
    """Splits the backward of one stage, micro-batch by micro-batch.

    Where a graph cannot be split, I computes all of it, and the log says why once.
    """

    def __init__(self, where: str = "a stage") -> None:
        self._where = where
        self._warned = False
        self._recipes: dict[Shape, Recipe] = {}
        self._latest: Recipe | None = None

    def run_input(
        self,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
    ) -> Pending | None:
        """I: add all gradients that W does not compute; None if W has nothing to do."""
        recipe, nodes = self._recipe(_computed(roots, inputs), inputs, weights)
        if recipe.whole:
            if not self._warned:
                self._warned = True
                _log.warning("%s: its backward is not split: %s", self._where, recipe.whole)
            accumulate(roots, gradients)
            return None
        found = [nodes[product.slot] for product in recipe.products]
        pending = Pending(recipe, found)
        edges = [GradientEdge(nodes[slot], 0) for slot in recipe.edges]
        for node in recipe.compiled:
            nodes[node.slot].put_off = pending, node
        new = [leaf for leaf in recipe.leaves if leaf.grad is None]
        # The engine runs faster without a list of inputs.
        everywhere = not found and all(x.is_leaf for x in inputs)
        accumulate(roots, gradients, () if everywhere else (*inputs, *recipe.leaves, *edges))
        if new:
            pending.copy_shared(new)
        return pending if found or pending.has_compiled else None

    def _recipe(
        self,
        roots: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
    ) -> tuple[Recipe, Sequence[Node]]:
        """The recipe for a graph, with its nodes; most often that of the previous graph."""
        recipe = self._latest
        if recipe is not None:
            nodes = recipe.shape.follow(roots, inputs)
            if nodes is not None and recipe.fits(nodes, inputs):
                return recipe, nodes
        graph = GradGraph(roots, inputs)
        recipe = self._recipes.get(graph.shape)
        if recipe is None or not recipe.fits(graph.nodes, inputs):
            recipe = learn(graph, inputs, weights)
            self._recipes.pop(graph.shape, None)
            self._recipes[graph.shape] = recipe
            if len(self._recipes) > _REMEMBERED:
                del self._recipes[next(iter(self._recipes))]
        self._latest = recipe
        return recipe, graph.nodes


def _computed(
    roots: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """The roots of the graph: an output that is an input has none, and only gets its gradient."""
    return [root for root in roots if not (root.is_leaf and is_among(root, inputs))]


def _versions(values: Iterable[object]) -> list[int]:
    return [value._version for value in values if isinstance(value, torch.Tensor)]
