"""A flat graph cut at its marks into one graph for each stage.

Values that a later stage needs travel through every boundary on their way::

    a = f(x)             stage 0: x       -> a, b
    b = g(a)
    ---------
    c = h(b)             stage 1: a, b    -> a, c
    ---------
    return c + a         stage 2: a, c    -> c + a
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

from taktline import pytree
from taktline.split.traced.alias import Aliases
from taktline.split.traced.arguments import add_checks
from taktline.split.traced.markers import is_marker
from taktline.split.traced.sizes import read_locally
from taktline.split.traced.state import Attribute, State

__all__ = ["Piece", "cut"]


@dataclass(slots=True)
class Piece:
    """The graph of one stage, and what it gets from its module."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    attributes: dict[str, Attribute] = field(default_factory=dict)

    def parameters(self) -> set[str]:
        """The names of its parameters."""
        return {
            name
            for name, attribute in self.attributes.items()
            if isinstance(attribute.value, torch.nn.Parameter)
        }


def cut(traced: fx.GraphModule, state: State) -> list[Piece]:
    """The pieces of a graph, in order."""
    stages = _stages(traced.graph)
    last = max(stages.values(), default=0)
    read_locally(traced.graph, stages, _crossing(stages, last))
    crossing = _crossing(stages, last)
    aliases = Aliases(stages)
    aliases.require_own_buffers(stages)
    pieces: list[Piece] = []
    for stage in range(last + 1):
        builder = _Builder(traced, state)
        if stage == 0:
            builder.take_arguments()
        else:
            builder.take(crossing[stage - 1], aliases.changed(stage, crossing[stage - 1]))
        for node in traced.graph.nodes:
            if node.op == "call_function" and stages.get(node) == stage:
                builder.copy(node)
        builder.give(None if stage == last else crossing[stage])
        builder.set_calling(first=stage == 0, last=stage == last)
        pieces.append(builder.piece)
    return pieces


def _crossing(stages: dict[fx.Node, int], last: int) -> list[list[fx.Node]]:
    """The values that pass each boundary."""
    until = {node: max(_uses(node, stages, last), default=0) for node in stages}
    return [
        [node for node, stage in stages.items() if stage <= boundary < until[node]]
        for boundary in range(last)
    ]


def _stages(graph: fx.Graph) -> dict[fx.Node, int]:
    """The stage of each value; marks with nothing between them count as one, and none at an end."""
    stages: dict[fx.Node, int] = {}
    stage, busy, due = 0, False, False
    for node in graph.nodes:
        if node.op == "placeholder":
            stages[node] = 0
        elif is_marker(node):
            due = busy
        elif node.op in ("call_function", "call_module", "call_method"):
            if _belongs_to_its_input(node):
                taken = [stages[part] for part in node.all_input_nodes if part in stages]
                stages[node] = max(taken, default=stage)
                continue
            if due:
                stage, due = stage + 1, False
            busy = True
            stages[node] = stage
    return stages


def _belongs_to_its_input(node: fx.Node) -> bool:
    """Whether a node is no reason to begin a stage, or to hand on what it takes.

    Parts of a result are, and checks, and buffers that are assigned: the trace does that at its
    end, whichever stage has computed them.
    """
    if node.target is torch.ops.aten.copy_.default:
        return getattr(node.args[0], "op", "") == "get_attr" and isinstance(node.args[1], fx.Node)
    return node.target is operator.getitem or "_assert" in str(node.target)


def _uses(node: fx.Node, stages: dict[fx.Node, int], last: int) -> list[int]:
    return [last if user.op == "output" else stages.get(user, 0) for user in node.users]


class _Builder:
    """Makes the graph of one stage."""

    def __init__(self, traced: fx.GraphModule, state: State) -> None:
        self._traced = traced
        self._state = state
        self._values: dict[fx.Node, fx.Node] = {}
        self._gotten: dict[str, fx.Node] = {}
        self._inputs: list[str] = []
        self.piece = Piece()

    def take_arguments(self) -> None:
        """What the whole module takes."""
        for node in self._traced.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = self.piece.graph.node_copy(node)
        add_checks(self.piece.graph, list(self._values.values()))

    def take(self, values: list[fx.Node], changed: set[fx.Node]) -> None:
        """What the stage before returns; copies of those that this stage changes in place."""
        for node in values:
            argument = self.piece.graph.placeholder(node.name)
            argument.meta = dict(node.meta)
            self._values[node] = argument
            self._inputs.append(argument.name)
        for node in values:
            if node in changed:
                copied = self.piece.graph.call_function(
                    torch.ops.aten.clone.default, (self._values[node],)
                )
                copied.meta = dict(node.meta)
                self._values[node] = copied

    def copy(self, node: fx.Node) -> None:
        """One operation."""
        names = {
            part: self._attribute(part, node)
            for part in node.all_input_nodes
            if part.op == "get_attr"
        }
        self._values[node] = self.piece.graph.node_copy(
            node, lambda part: names.get(part) or self._values[part]
        )

    def give(self, values: list[fx.Node] | None) -> None:
        """What the next stage takes; None: what the whole module returns."""
        if values is not None:
            given = tuple(self._values[node] for node in values)
            self.piece.graph.output(given[0] if len(given) == 1 else given)
            return
        output = self._traced.graph.output_node()
        result = fx.map_arg(
            output.args[0],
            lambda part: (
                self._attribute(part, output) if part.op == "get_attr" else self._values[part]
            ),
        )
        self.piece.graph.output(result)

    def set_calling(self, *, first: bool, last: bool) -> None:
        """Take and give containers where the whole module does."""
        codegen = self._traced.graph._codegen
        if not isinstance(codegen, _PyTreeCodeGen) or not (first or last):
            return
        info = codegen.pytree_info
        names, in_spec = info.orig_args, info.in_spec
        if not first:
            names = self._inputs
            in_spec = pytree.tree_structure((tuple(range(len(names))), {}))
        out_spec = info.out_spec if last else None
        self.piece.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, in_spec, out_spec)))

    def _attribute(self, node: fx.Node, user: fx.Node) -> fx.Node:
        traced_name = str(node.target)
        name = self._state.name_for(traced_name, user)
        if name not in self._gotten:
            attribute: Any = self._state.attribute(self._traced, name)
            self.piece.attributes[name] = attribute
            made = self.piece.graph.create_node("get_attr", name)
            made.meta = dict(node.meta)
            self._gotten[name] = made
        return self._gotten[name]
