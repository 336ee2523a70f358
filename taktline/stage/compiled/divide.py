"""Divides the graph of a compiled backward into I and W.

::

    whole      saved, dY ──▶ ┌────────────────┐ ──▶ dX, db, dW
                             └────────────────┘
    in I       saved, dY ──▶ ┌──────────┐ ──▶ dX, db
                             └────┬─────┘
    in W       saved ───────▶ ┌───▼──────┐ ──▶ dW
                              └──────────┘

W computes the last products on the way to gradients of weights, and all that follows from them. I
computes the rest, fused with its inputs: sums for biases and norms cost next to nothing there, and
in W would need activations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from taktline.private import private

_aten: Any = torch.ops.aten

_PRODUCTS = frozenset(
    [
        _aten.mm,
        _aten.addmm,
        _aten.bmm,
        _aten.baddbmm,
        _aten.convolution_backward,
        _aten.embedding_dense_backward,
    ]
)
_VIEWS = frozenset(
    [
        _aten.alias,
        _aten.expand,
        _aten.permute,
        _aten.reshape,
        _aten.squeeze,
        _aten.t,
        _aten.transpose,
        _aten.unsqueeze,
        _aten.view,
    ]
)
_CASTS = frozenset(
    [
        private("torch.ops.aten._to_copy", "W of a cast weight", None),
        torch.ops.prims.convert_element_type,
    ]
)
_UNSAFE_VIEW = private("torch.ops.aten._unsafe_view", "W behind a view", None)


@dataclass(frozen=True, slots=True)
class Division:
    """The two halves of a graph, and the arguments of each."""

    first: fx.GraphModule
    """Returns all results, None for those of the second, and then inputs of the second."""
    second: fx.GraphModule
    """Takes arguments of the whole, and results of the first."""
    takes_first: tuple[int, ...]
    takes_second: tuple[int, ...]
    made: tuple[fx.Node, ...]
    """The nodes that the first computes for the second."""
    later: tuple[int, ...]
    """The numbers of the results that the second returns."""
    are_shared: tuple[bool, ...]
    """For each of these, whether another has the same memory."""

    @property
    def has_only_products(self) -> bool:
        """Whether the second half computes products, and nothing that a compiler could fuse."""
        computed = [node for node in self.second.graph.nodes if node.op == "call_function"]
        return all(_is(node, _PRODUCTS | _VIEWS | _CASTS) for node in computed)


def divide(whole: fx.GraphModule, later: Collection[int]) -> Division | str | None:
    """The halves of a graph whose results ``later`` may come later; or why it cannot be divided.

    None if there is nothing to put off.
    """
    nodes = list(whole.graph.nodes)
    if effect := _effect(nodes):
        return effect
    results: Sequence[Any] = nodes[-1].args[0]
    late = _late(nodes, results, later)
    ours = tuple(i for i in later if isinstance(results[i], fx.Node) and results[i] in late)
    if not ours:
        return None
    given = [node for node in nodes if node.op == "placeholder"]
    crossing = dict.fromkeys(
        need for node in nodes if node in late for need in node.all_input_nodes if need not in late
    )
    made = [node for node in crossing if node.op not in ("placeholder", "get_attr")]
    if not all(isinstance(node.meta.get("val"), (torch.Tensor, torch.SymInt)) for node in made):
        return "W needs a non-tensor value"
    early = [None if i in ours else result for i, result in enumerate(results)]
    first, takes_first = _part(whole, given, [*early, *made], ())
    second, takes_second = _part(whole, given, [results[i] for i in ours], made)
    bases = [_base(results[i]) for i in ours]
    are_shared = tuple(bases.count(base) > 1 for base in bases)
    return Division(first, second, takes_first, takes_second, tuple(made), ours, are_shared)


def _effect(nodes: Iterable[fx.Node]) -> str | None:
    """Why a graph cannot run in two parts; None if it can."""
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return f"its backward changes a tensor in place ({node.target})"
    return None


def _late(nodes: Sequence[fx.Node], results: Sequence[Any], later: Collection[int]) -> set[fx.Node]:
    """The nodes of W."""
    now = _needed(result for i, result in enumerate(results) if i not in later)
    # Products with weights lead to gradients of weights, too, if those of inputs are not needed.
    now |= _needed(need for node in nodes if _is(node, _PRODUCTS) for need in node.all_input_nodes)
    then = _needed(results[i] for i in later) - now
    late: set[fx.Node] = set()
    for node in nodes:
        if node in then and (_is(node, _PRODUCTS) or any(x in late for x in node.all_input_nodes)):
            late.add(node)
    for node in reversed(nodes):  # a view is free in W; in I, its base would be kept besides
        if _is(node, _VIEWS) and all(user in late for user in node.users):
            late.add(node)
    return late


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory a node views, or a part of it."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    if node.target is getitem:  # of a list of views
        return _is_view(node.all_input_nodes[0])
    schema = getattr(node.target, "_schema", None)
    return _is(node, (_UNSAFE_VIEW,)) or (
        schema is not None and any(argument.alias_info for argument in schema.arguments)
    )


def _is(node: fx.Node, kinds: Collection[object]) -> bool:
    return getattr(node.target, "overloadpacket", None) in kinds


def _needed(results: Iterable[Any], made: Collection[fx.Node] = ()) -> set[fx.Node]:
    """All nodes that results are computed from; ``made`` are computed already."""
    found: set[fx.Node] = set()
    waiting = [node for node in results if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += () if node in made else node.all_input_nodes
    return found


def _part(
    whole: fx.GraphModule, given: Sequence[fx.Node], results: Sequence[Any], made: Sequence[fx.Node]
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """A graph that computes results from arguments of the whole and nodes of the first half."""
    needed = _needed(results, made)
    # Dynamic sizes are arguments of their own.
    takes = [i for i, x in enumerate(given) if x in needed or _is_size(x.meta.get("val"))]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in [*(given[i] for i in takes), *made]:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in whole.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    output = graph.output([copies[x] if isinstance(x, fx.Node) else x for x in results])
    # Visible outputs keep the strides of the trace.
    visible = [i for i, x in enumerate(results) if isinstance(x, fx.Node)]
    output.meta["user_visible_output_idxs"] = visible
    return fx.GraphModule(whole, graph), tuple(takes)


def _is_size(value: object) -> bool:
    return isinstance(value, torch.SymInt)
