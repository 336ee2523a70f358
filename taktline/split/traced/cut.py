"""Cuts a trace at its marks into one module for each stage.

A value that a later stage needs crosses every boundary on its way::

    a = f(x)             stage 0: x       -> a, b
    b = g(a)
    ---------
    c = h(b)             stage 1: a, b    -> a, c
    ---------
    return c + a         stage 2: a, c    -> c + a
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from taktline.errors import PartitionError
from taktline.split.arguments import aliased
from taktline.split.traced.stage_module import Arguments, Output
from taktline.split.traced.trace import is_mark

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Piece = tuple[fx.Graph, dict[str, tuple[Any, bool]]]
"""A graph, its attributes, and whether each is in the state dict."""
_Stages = dict[fx.Node, int]


def cut(
    model: nn.Module,
    program: ExportedProgram,
    policy: Callable[[fx.GraphModule], fx.GraphModule] | None,
) -> list[Piece]:
    """The pieces of a trace, in order; ``policy`` may add marks to it."""
    example: Any = program.example_inputs
    traced: Any = program.module(check_guards=False)  # the first stage checks its arguments
    if policy is not None:
        traced = policy(traced)
        if not isinstance(traced, fx.GraphModule):
            raise PartitionError(
                f"split_policy must return the GraphModule with its marks, not {traced!r}"
            )
    stages = _find_stages(traced)
    _require_own_memory(traced, stages)
    prefix = "_train_" if model.training else "_eval_"
    end, made = traced.graph.output_node(), list[Piece]()
    for stage in range(stages[end] + 1):
        builder = _Builder(model, traced, prefix)
        if stage == 0:
            arguments = [node for node in stages if node.op == "placeholder"]
            names = [node.name for node in arguments]
            builder.take_arguments(arguments, Arguments(model.forward, example, names))
        else:
            builder.take(_crossing(stages, stage - 1))
        for node, place in stages.items():
            if place == stage and node.op == "call_function":
                builder.copy(node)
        if stage < stages[end]:
            builder.give(_crossing(stages, stage))
        else:
            tree: Any = program.call_spec.out_spec
            builder.give_output(end, Output(tree))
        made.append((builder.graph, builder.parts))
    return made


def _find_stages(traced: fx.GraphModule) -> _Stages:
    """The stage of each value. Marks with nothing between them count once, and none at an end."""
    for part in traced.modules():
        nodes = part.graph.nodes if isinstance(part, fx.GraphModule) and part is not traced else ()
        if any(map(is_mark, nodes)):
            raise PartitionError(
                "a split point is inside a region that cannot be cut (torch.no_grad(), "
                "torch.autocast(), torch.cond() or another one); move the split point before or "
                "after the region"
            )
    stages: _Stages = {}
    stage, busy, due = 0, False, False
    for node in traced.graph.nodes:
        if is_mark(node):
            due = busy
        elif node.op == "call_function" and _belongs_to_its_input(node):
            taken = [stages[part] for part in node.all_input_nodes if part in stages]
            stages[node] = max(taken, default=stage)
        elif node.op == "call_function":
            stage, busy, due = stage + due, True, False
            stages[node] = stage
        elif node.op != "get_attr":
            stages[node] = stage
    return stages


def _belongs_to_its_input(node: fx.Node) -> bool:
    """Whether a node lies in the stage of its inputs, so that these need not cross.

    Parts of a result and checks do. So do assignments of buffers, which a trace makes at its end.
    """
    if node.target is torch.ops.aten.copy_.default:
        return getattr(node.args[0], "op", "") == "get_attr" and isinstance(node.args[1], fx.Node)
    return node.target is operator.getitem or "_assert" in str(node.target)


def _crossing(stages: _Stages, boundary: int) -> list[fx.Node]:
    """The values that go from a stage to the next one."""
    return [
        node
        for node, stage in stages.items()
        if stage <= boundary and any(stages[user] > boundary for user in node.users)
    ]


def _require_own_memory(traced: fx.GraphModule, stages: _Stages) -> None:
    """Raise if a stage changes memory that another stage has: there, nobody would notice."""
    memory = _Memory(traced)
    for root, node in memory.written:
        is_own = root.op == "get_attr"
        used = {stages[user] for user in memory.users[root]} if is_own else {stages[root]}
        name = root.target if is_own else root.name
        for other in used - {stages[node]}:
            raise PartitionError(
                f"stage {stages[node]} changes {name!r} in place ({node.target}), "
                f"which stage {other} uses too; use an operation that makes a new tensor, or move "
                "the split point so that one stage does both"
            )


class _Memory:
    """Which values of a graph share memory, and which operations write to it."""

    def __init__(self, traced: fx.GraphModule) -> None:
        self.users: dict[fx.Node, list[fx.Node]] = {}
        """By the value that was first in that memory."""
        self.written: list[tuple[fx.Node, fx.Node]] = []
        """Such values, and operations that write to them."""
        self.returned: list[fx.Node] = []
        """Such values whose memory the graph returns."""
        roots: dict[fx.Node, list[fx.Node]] = {}
        tensors: dict[int, fx.Node] = {}
        for node in traced.graph.nodes:
            viewed, written = _shared(traced, node)
            roots[node] = [root for part in viewed for root in roots[part]] or [node]
            if node.op == "get_attr":
                roots[node] = [tensors.setdefault(id(_attribute(traced, node)), node)]
            for part in node.all_input_nodes:
                for root in roots[part]:
                    self.users.setdefault(root, []).append(node)
            self.written += [(root, node) for part in written for root in roots[part]]
            if node.op == "output":
                self.returned = [root for part in node.all_input_nodes for root in roots[part]]


def _shared(traced: fx.GraphModule, node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The inputs that the result of a node may be a view of, and those that the node changes."""
    inputs = node.all_input_nodes
    parts = [_attribute(traced, part) for part in inputs if part.op == "get_attr"]
    regions = [_Memory(part) for part in parts if isinstance(part, fx.GraphModule)]
    if regions:  # which of its inputs they are, is not looked into
        written = any(root.op == "placeholder" for each in regions for root, _ in each.written)
        viewed = any(root.op == "placeholder" for each in regions for root in each.returned)
        return inputs if viewed else [], inputs if written else []
    if node.target is operator.getitem:
        return inputs, []
    call = (node.target, node.args, node.kwargs)
    viewed, written = (list(aliased(*call, written=only)) for only in (False, True))
    return [part for part in viewed if part in inputs], [part for part in written if part in inputs]


def _attribute(traced: fx.GraphModule, node: fx.Node) -> Any:
    """What a node gets from the trace: a parameter, a buffer, a constant or a region."""
    return attrgetter(str(node.target))(traced)


class _Builder:
    """Makes the graph of one stage."""

    def __init__(self, model: nn.Module, traced: fx.GraphModule, prefix: str) -> None:
        own = (model.named_parameters, model.named_buffers)
        self._own = {name: part for each in own for name, part in each(remove_duplicate=False)}
        self._saved = set(model.state_dict(keep_vars=True))
        self._traced, self._prefix = traced, prefix
        self._values: dict[Any, fx.Node] = {}
        self.graph = fx.Graph()
        self.parts: dict[str, tuple[Any, bool]] = {}

    def take_arguments(self, nodes: list[fx.Node], module: Arguments) -> None:
        """Take the arguments of the model."""
        given = (self.graph.placeholder("*args"), self.graph.placeholder("**kwargs"))
        leaves = self._call("arguments", module, given)
        for place, node in enumerate(nodes):
            self._values[node] = self.graph.call_function(operator.getitem, (leaves, place))

    def take(self, nodes: list[fx.Node]) -> None:
        """Take what the stage before gives; keywords of the model reach all stages of a rank."""
        self._values = {node: self.graph.placeholder(f"given_{node.name}") for node in nodes}
        self.graph.placeholder("**kwargs")

    def copy(self, node: fx.Node) -> None:
        """Copy one operation."""
        self._values[node] = self.graph.node_copy(node, lambda part: self._value(part, node))

    def give(self, nodes: list[fx.Node]) -> None:
        """Give the next stage what it takes."""
        given = tuple(self._values[node] for node in nodes)
        self.graph.output(given[0] if len(given) == 1 else given)

    def give_output(self, node: fx.Node, module: Output) -> None:
        """Give what the model gives."""
        leaves: Any = fx.map_arg(node.args[0], lambda part: self._value(part, node))
        self.graph.output(self._call("output", module, tuple(leaves)))

    def _call(self, name: str, module: nn.Module, given: tuple[Any, ...]) -> fx.Node:
        self.parts[self._prefix + name] = module, False
        return self.graph.call_module(self._prefix + name, given)

    def _value(self, part: fx.Node, user: fx.Node) -> fx.Node:
        if part.op != "get_attr":
            return self._values[part]
        name = str(part.target)
        if name in self._own:
            name = self._name_for(name, user)
            found = self._own[name], name in self._saved
        else:  # a constant of the trace
            name, found = self._prefix + name, (_attribute(self._traced, part), False)
        if name not in self.parts:
            self.parts[name] = found
            self._values[name] = self.graph.create_node("get_attr", name)
        return self._values[name]

    def _name_for(self, name: str, user: fx.Node) -> str:
        """The name of a parameter or buffer in the model; a tied weight has several."""
        names = [known for known, part in self._own.items() if part is self._own[name]]
        for path, _ in reversed((user.meta.get("nn_module_stack") or {}).values()):
            path = str(path).partition("@")[0]  # name@1 is the second call
            inside = [known for known in names if known.rpartition(".")[0] == path]
            if inside:
                return name if name in inside else inside[0]
        return name
