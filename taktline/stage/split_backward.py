"""The split backward: I computes the gradients of a stage's inputs, W those of its weights.

W computes the matrix products of linear layers, which can be put off cheaply::

    forward    Y = X · Wᵀ + b          the graph:   Addmm ──▶ X
                                                     ├─────▶ b
    in I       dX = dY · W, db, and                  └─ T ──▶ W
               X and dY are kept
    in W       dW = dYᵀ · X

I is one pass of the engine over the graph without these products. It frees the graph and keeps X
and dY of each linear layer. The engine computes all other gradients on the way: norms, biases,
embeddings, convolutions, checkpointed blocks, and weights with more than one use in the stage.

    roots ─GradGraph─▶ nodes and their key ─learn─▶ Recipe ─run_input─▶ Pending ─run─▶ W

The recipe for a graph is remembered by the graph's key: the kinds of its nodes, its edges and its
leaves. Each graph is compared, since only its edges show whether a weight has one more use.

A compiled block is one node here, and decides itself what to leave out: see ``compiled``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from taktline.errors import SplitError
from taktline.meta import local
from taktline.private import for_all, lacking, private

_log = logging.getLogger("taktline")

Node = Any
"""A node of the autograd graph; torch has no public type with all its fields."""
Root: TypeAlias = torch.Tensor | GradientEdge
"""Where a backward begins: a tensor, or its place in the graph."""

_LEAF: Any = type(get_gradient_edge(torch.zeros(0, requires_grad=True)).node)
_TURN, _CAST = "TBackward0", "ToCopyBackward0"
_REENTRANT = "CheckpointFunctionBackward"
_COMPILED = "CompiledFunctionBackward"
_FEATURE = "a backward in halves"
_UNSEEN = lacking(
    *(torch.Tensor, "_backward_hooks", "_post_accumulate_grad_hooks", "_version"), feature=_FEATURE
)
"""Why no backward is split; None if torch has what that needs of tensors."""
_REMEMBERED = 8
"""The most recipes that are kept."""


class _Kind(NamedTuple):
    """A kind of product."""

    edge: int
    """The edge that leads to the weight."""
    factor: str
    """The node's attribute with the other factor."""
    raw: str
    """The same before hooks on saved tensors."""
    scale: str
    """The attribute by which the node may scale the product; empty if it has none."""


_KINDS = {
    "AddmmBackward0": _Kind(2, "_saved_mat1", "_raw_saved_mat1", "_saved_alpha"),
    "MmBackward0": _Kind(1, "_saved_self", "_raw_saved_self", ""),
}


@dataclass(frozen=True, slots=True)
class Product:
    """One product that W computes."""

    slot: int
    """The place of its node."""
    kind: _Kind
    chain: Sequence[str]
    """The names of the nodes from it to the weight."""
    weight: torch.Tensor

    def compute(self, factor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the weight, by the same product as the engine's."""
        if gradient.requires_grad:  # it comes from the caller of the backward
            gradient = gradient.detach()
        turned = _TURN in self.chain
        product = gradient.t().mm(factor) if turned else factor.t().mm(gradient)
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
    """How to split the graphs that have one key."""

    products: Sequence[Product] = ()
    leaves: Sequence[torch.Tensor] = ()
    """The leaves whose gradients I computes, besides the stage's inputs."""
    edges: Sequence[int] = ()
    """The places of products that the engine reaches only if asked to."""
    compiled: Sequence[CompiledNode] = ()
    whole: str = ""
    """Why I computes all gradients; empty if the graph can be split."""

    def fits(self, nodes: Sequence[Node]) -> bool:
        """Whether W can compute the products of a graph with this key, as no hook forbids it."""
        for product in self.products:
            if _hooked(product.weight) or not _is_plain(product.kind, nodes[product.slot]):
                return False
        return not any(_hooked(x) for node in self.compiled for x in node.leaves.values())


class Pending:
    """The work of W for one micro-batch."""

    __slots__ = ("_compiled", "_factors", "_gradients", "_products", "_versions")

    def __init__(self, products: Sequence[Product], nodes: Sequence[Node]) -> None:
        self._products = products
        self._factors: list[torch.Tensor] = []
        # The incoming gradients of the nodes, in the order in which the engine reaches them.
        self._gradients: dict[int, tuple[torch.Tensor | None]] = {}
        for index, product in enumerate(products):
            node = nodes[product.slot]
            self._factors.append(getattr(node, product.kind.factor).detach())
            node.register_prehook(partial(self._gradients.__setitem__, index))
        self._versions = _versions(self._factors)
        self._compiled: list[tuple[list[Any], list[int], Callable[[list[Any]], None]]] = []

    def __bool__(self) -> bool:
        return bool(self._products or self._compiled)

    def take_over(self, held: list[Any], run: Callable[[list[Any]], None]) -> None:
        """Later, also run the function of a compiled node with the values that it needs."""
        self._compiled.append((held, _versions(held), run))

    def copy_shared(self, leaves: Sequence[torch.Tensor]) -> None:
        """Copy new gradients that share memory with kept values: later ones are added in place."""
        values = [g for (g,) in self._gradients.values() if g is not None]
        values += [x for held, *_ in self._compiled for x in held if isinstance(x, torch.Tensor)]
        kept = set(map(memory_of, values))
        for leaf in leaves:
            if leaf.grad is not None and (None in kept or memory_of(leaf.grad) in (None, *kept)):
                leaf.grad = leaf.grad.clone()

    def run(self) -> None:
        """Compute the products, in the engine's order, and add them to the gradients."""
        if _versions(self._factors) != self._versions or any(
            _versions(held) != versions for held, versions, _ in self._compiled
        ):
            raise SplitError(
                "an input of a linear layer was changed in place between the backward for the "
                "inputs (I) and that for the weights (W)"
            )
        for index, (gradient,) in self._gradients.items():
            product = self._products[index]
            if gradient is not None:
                add_to_grad(product.weight, product.compute(self._factors[index], gradient))
        for held, _, run in self._compiled:
            run(held)
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
        self._recipes: dict[object, Recipe] = {}

    def run_input(
        self,
        roots: Sequence[Root],
        gradients: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
    ) -> Pending | None:
        """I: add all gradients that W does not compute; None if W has nothing to do."""
        given = set(map(id, inputs))
        # An output that is an input has no graph, and only gets its gradient.
        nodes = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
        left = [n for n, x in zip(nodes, roots, strict=True) if n is not None or id(x) not in given]
        graph = GradGraph(left, inputs)
        recipe, nodes = self._recipe(graph, weights), graph.nodes
        if recipe.whole:
            if not self._warned:
                self._warned = True
                _log.warning("%s: its backward is not split: %s", self._where, recipe.whole)
            accumulate(roots, gradients)
            return None
        pending = Pending(recipe.products, nodes)
        edges = [GradientEdge(nodes[slot], 0) for slot in recipe.edges]
        for node in recipe.compiled:
            nodes[node.slot].put_off = pending, node
        new = [leaf for leaf in recipe.leaves if leaf.grad is None]
        # The engine runs faster without a list of inputs.
        everywhere = not recipe.products and all(x.is_leaf for x in inputs)
        accumulate(roots, gradients, () if everywhere else (*inputs, *recipe.leaves, *edges))
        if new:
            pending.copy_shared(new)
        return pending or None

    def _recipe(self, graph: GradGraph, weights: Sequence[torch.Tensor]) -> Recipe:
        key = tuple(graph.key)
        recipe = self._recipes.get(key)
        if recipe is None or not recipe.fits(graph.nodes):
            self._recipes.pop(key, None)
            if len(self._recipes) == _REMEMBERED:
                del self._recipes[next(iter(self._recipes))]
            self._recipes[key] = recipe = learn(graph, set(weights))
        return recipe


class GradGraph:
    """All nodes that the roots reach; a node's slot is its place in the order of discovery."""

    def __init__(self, roots: Sequence[Node | None], inputs: Sequence[torch.Tensor]) -> None:
        given = set(map(id, inputs))
        # Nodes behind an input that is no leaf belong to other stages.
        ends = {x.grad_fn for x in inputs if x.grad_fn is not None}
        self.roots = roots
        self.nodes: list[Node] = []
        self.leaves: dict[int, torch.Tensor] = {}
        """The leaves that are no inputs of the stage, by slot."""
        self.key: list[object] = []
        """For each node its kind, its leaf, and the slots that its edges lead to."""
        slots: dict[Node | None, int] = {None: -1}
        nodes, key = self.nodes, self.key

        def follow(edges: Iterable[tuple[Node | None, int]]) -> None:
            for child, _ in edges:
                slot = slots.get(child)
                if slot is None:
                    slots[child] = slot = len(nodes)
                    nodes.append(child)
                key.append(slot)

        follow((root, 0) for root in self.roots)
        for slot, node in enumerate(nodes):  # the list grows meanwhile
            key.append(type(node))
            if type(node) is _LEAF:
                leaf = node.variable
                if id(leaf) not in given:
                    self.leaves[slot] = leaf
                    key.append(id(leaf))
            elif node not in ends:
                follow(node.next_functions)

    def consumers(self) -> dict[Node, list[tuple[Node, int]]]:
        """The nodes that lead to each node, with the number of the edge."""
        found: dict[Node, list[tuple[Node, int]]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for edge, (child, _) in enumerate(node.next_functions):
                if child in found:
                    found[child].append((node, edge))
        return found


def learn(graph: GradGraph, weights: Collection[torch.Tensor]) -> Recipe:
    """The recipe for a graph: W computes the products of weights that have no other use."""
    reason = _UNSEEN or ""
    if None in graph.roots:
        reason = "an output of the stage is one of its parameters"
    elif any(node.name() == _REENTRANT for node in graph.nodes):
        reason = "re-entrant checkpointing runs its backward at once; pass use_reentrant=False"
    elif not all(leaf in weights for leaf in graph.leaves.values()):
        reason = "the graph reaches tensors that are no parameters or inputs of the stage"
    if reason:
        return Recipe(whole=reason)
    consumers = graph.consumers()
    products = [
        product
        for slot, weight in graph.leaves.items()
        if (product := _product(graph, consumers, graph.nodes[slot], weight)) is not None
    ]
    later = {product.weight for product in products}
    early = [leaf for leaf in graph.leaves.values() if leaf not in later]
    # The nodes that the engine passes on its way to other leaves, and to the stage's inputs.
    reached: set[Node] = set()
    waiting = [
        node
        for slot, node in enumerate(graph.nodes)
        if type(node) is _LEAF and graph.leaves.get(slot) not in later
    ]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += [consumer for consumer, _ in consumers[node]]
    compiled = [
        _compiled_node(graph, consumers, slot, early)
        for slot, node in enumerate(graph.nodes)
        if node.name() == _COMPILED
    ]
    edges = [product.slot for product in products if graph.nodes[product.slot] not in reached]
    return Recipe(products, early, edges, compiled)


_Consumers = Mapping[Node, Sequence[tuple[Node, int]]]


def _compiled_node(
    graph: GradGraph, consumers: _Consumers, slot: int, leaves: Sequence[torch.Tensor]
) -> CompiledNode:
    edges, early = graph.nodes[slot].next_functions, set(leaves)
    found = {
        edge: node.variable
        for edge, (node, _) in enumerate(edges)
        if type(node) is _LEAF
        and len(consumers[node]) == 1
        and node.variable in early
        and not (_hooked(node.variable) or _is_node_hooked(node))
    }
    return CompiledNode(slot, len(edges), found)


def _product(
    graph: GradGraph, consumers: _Consumers, leaf: Node, weight: torch.Tensor
) -> Product | None:
    """The product that is the only use of a weight; None if W cannot compute it."""
    # The engine chooses the form of a product by the strides, which for 1 × 1 are ambiguous.
    plain = weight.dim() == 2 and weight.stride() == (weight.size(1), 1) and weight.numel() != 1
    if not plain or weight.is_complex() or _hooked(weight) or _is_node_hooked(leaf):
        return None
    here, chain = leaf, list[str]()
    while len(consumers[here]) == 1 and here not in graph.roots:
        ((here, edge),) = consumers[here]
        name, kind = here.name(), _KINDS.get(here.name())
        if name in (_TURN, _CAST) and name not in chain:
            chain.append(name)
        elif kind and kind.edge == edge and _is_known(kind, here) and _is_plain(kind, here):
            return Product(graph.nodes.index(here), kind, chain, weight)
        else:
            break
    return None


def _is_plain(kind: _Kind, product: Node) -> bool:
    """Whether a product is not scaled, and its factor is kept as it was.

    It is not if the product is checkpointed, or its activations are kept elsewhere by others.
    """
    hook = getattr(product, kind.raw).unpack_hook
    if hook is not None and not is_own_hook(hook):
        return False
    return not kind.scale or getattr(product, kind.scale) == 1


def _is_known(kind: _Kind, product: Node) -> bool:
    """Whether the installed torch has the attributes of a product's node."""
    names = [name for name in (kind.factor, kind.raw, kind.scale) if name]
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


def _versions(values: Iterable[object]) -> list[int]:
    return [value._version for value in values if isinstance(value, torch.Tensor)]


SMALL = 8 * 2**20
"""The most bytes of a gradient whose addition takes longer to launch than to run.

Adding many larger ones at once is slower than one by one."""

# The call inside of torch.autograd.backward(), whose checks cost as much as the whole backward of a
# small stage, and are not needed here.
_engine = private("torch.autograd.Variable._execution_engine", "a quick backward", None)

add_all = for_all("torch._foreach_add_", torch.Tensor.add_)
"""Adds to many tensors in one call."""


def accumulate(
    roots: Sequence[Root], gradients: Sequence[torch.Tensor], inputs: Sequence[Any] = ()
) -> None:
    """Add gradients to the ``.grad`` of ``inputs``, or of all leaves, and free the graph."""
    if _engine is None:
        mixed: Any = tuple(roots)
        torch.autograd.backward(mixed, tuple(gradients), inputs=tuple(inputs) or None)
        return
    _engine.run_backward(
        tuple(roots),
        tuple(gradients),
        False,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def add_to_grad(leaf: torch.Tensor, gradient: torch.Tensor, is_shared: bool = False) -> None:
    """Add to a leaf's ``.grad``, as the engine does; a shared gradient does not become it."""
    known = leaf.grad
    if known is not None:
        # By .data, if the gradient itself was differentiated.
        (known.data if known.requires_grad else known).add_(gradient)
    else:
        if type(gradient) is torch.Tensor and (
            gradient.stride() != leaf.stride() or gradient.is_conj()
        ):  # such as an expanded one, which cannot be added to
            gradient = torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)
        elif is_shared:
            gradient = gradient.clone()
        leaf.grad = gradient if leaf.grad_dtype is None else gradient.to(leaf.grad_dtype)


def add_to_grads(weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add to the ``.grad`` of weights; small plain gradients together, in one operation."""
    sums: list[torch.Tensor] = []
    new: list[torch.Tensor] = []
    users: Counter[int | None] | None = None
    for weight, gradient in zip(weights, gradients, strict=True):
        old = weight.grad
        if gradient is None:
            continue
        if old is None:
            users, memory = users or _users(gradients), memory_of(gradient)
            shared = len(gradients) > 1 and (memory is None or users[None] or users[memory] > 1)
            add_to_grad(weight, gradient, is_shared=bool(shared))
        elif (
            type(old) is type(gradient) is torch.Tensor
            and not old.requires_grad
            and old.dtype == gradient.dtype
            and old.nbytes <= SMALL
        ):
            sums.append(old)
            new.append(gradient)
        else:
            add_to_grad(weight, gradient)
    if sums:
        add_all(sums, new)


def memory_of(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's memory; None for a wrapper, such as the result of a collective."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except RuntimeError:
        return None


def _users(values: Iterable[object]) -> Counter[int | None]:
    """How many of the values have the same memory."""
    return Counter(memory_of(value) for value in values if isinstance(value, torch.Tensor))


def is_own_hook(hook: object) -> bool:
    """Whether a hook is an object of this package: such hooks work in every kind of backward."""
    return type(hook).__module__.startswith("taktline.")
