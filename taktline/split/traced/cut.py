"""Cuts a flat graph at its marks into one graph for each stage.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx

from taktline import pytree
from taktline.errors import PartitionError
from taktline.private import private
from taktline.split.arguments import aliased
from taktline.split.traced.markers import is_marker
from taktline.split.traced.shapes import add_checks, read_sizes_locally
from taktline.split.traced.state import State

_CodeGen = private("torch.fx.graph._PyTreeCodeGen", "a traced split")
_TreeInfo = private("torch.fx.graph._PyTreeInfo", "a traced split")


def cut(traced: fx.GraphModule, state: State) -> list[fx.Graph]:
    """The graphs of the stages, in order; ``state`` has their attributes."""
    stages = _stages(traced.graph)
    last = stages[traced.graph.output_node()]
    read_sizes_locally(traced.graph, stages, _crossing(stages, last))
    crossing = _crossing(stages, last)
    aliases = _Aliases(stages)
    aliases.require_own_buffers(stages)
    made: list[fx.Graph] = []
    for stage in range(last + 1):
        builder = _Builder(traced, state)
        if stage == 0:
            builder.take_arguments()
        else:
            builder.take(crossing[stage - 1], aliases.changed(stage, crossing[stage - 1]))
        is_past = False
        for node in traced.graph.nodes:
            if not is_past and stages.get(node, 0) > stage:
                is_past = True  # buffers may be assigned later
                builder.clone(aliases.of_changed_buffers(stage, crossing[stage]))
            if node.op != "placeholder" and stages.get(node) == stage:
                builder.copy(node)
        if stage < last:
            builder.return_(crossing[stage])
        builder.set_calling(first=stage == 0, last=stage == last)
        made.append(builder.graph)
    return made


def _crossing(stages: dict[fx.Node, int], last: int) -> list[list[fx.Node]]:
    """The values that cross each boundary."""
    until = {node: max((stages.get(user, 0) for user in node.users), default=0) for node in stages}
    return [
        [node for node, stage in stages.items() if stage <= boundary < until[node]]
        for boundary in range(last)
    ]


def _stages(graph: fx.Graph) -> dict[fx.Node, int]:
    """The stage of each value. Marks with nothing between them count once, and none at an end."""
    stages: dict[fx.Node, int] = {}
    stage, busy, due = 0, False, False
    for node in graph.nodes:
        if node.op == "placeholder":
            stages[node] = 0
        elif is_marker(node):
            due = busy
        elif node.op == "call_function":
            if _belongs_to_its_input(node):
                taken = [stages[part] for part in node.all_input_nodes if part in stages]
                stages[node] = max(taken, default=stage)
                continue
            if due:
                stage, due = stage + 1, False
            busy = True
            stages[node] = stage
        elif node.op == "output":
            stages[node] = stage
    return stages


def _belongs_to_its_input(node: fx.Node) -> bool:
    """Whether a node lies in the stage of its inputs, so that these need not cross.

    Parts of a result and checks do. So do assignments of buffers, which a trace makes at its end.
    """
    if node.target is torch.ops.aten.copy_.default:
        return getattr(node.args[0], "op", "") == "get_attr" and isinstance(node.args[1], fx.Node)
    return node.target is operator.getitem or "_assert" in str(node.target)


class _Aliases:
    """Which values of a graph share memory, and which operations write to it."""

    def __init__(self, stages: Mapping[fx.Node, int]) -> None:
        self._root: dict[fx.Node, fx.Node] = {}
        self._written: dict[int, dict[fx.Node, fx.Node]] = {}
        for node, stage in stages.items():
            self._root[node] = self._find_root(node)
            for target in _aliased_nodes(node, written=True):
                root = self._root.get(target, target)
                self._written.setdefault(stage, {})[root] = node

    def _find_root(self, node: fx.Node) -> fx.Node:
        if node.target is operator.getitem:
            # A part of a result: chunk() returns views of its argument, max() new tensors.
            whole = node.all_input_nodes[0]
            root = self._root.get(whole, whole)
            return node if root is whole else root
        viewed = next(_aliased_nodes(node, written=False), None)
        return node if viewed is None else self._root.get(viewed, viewed)

    def require_own_buffers(self, stages: Mapping[fx.Node, int]) -> None:
        """Raise if a stage changes a parameter or buffer that another stage uses.

        The other stage would not notice if it runs on another rank.
        """
        for stage, written in self._written.items():
            for root, node in written.items():
                users = sorted({stages[user] for user in root.users if user in stages} - {stage})
                if root.op == "get_attr" and users:
                    raise PartitionError(
                        f"stage {stage} changes {str(root.target)!r} ({node.target}), which stage "
                        f"{users[0]} uses too; move the split point so that one stage does both"
                    )

    def of_changed_buffers(self, stage: int, values: Sequence[fx.Node]) -> Iterable[fx.Node]:
        """The sent values that are views of a buffer which the stage changes.

        The stage must copy them: it changes the buffer again before the next stage reads them.
        """
        roots = {root for root in self._written.get(stage, {}) if root.op == "get_attr"}
        return [node for node in values if self._root[node] in roots]

    def changed(self, stage: int, values: Sequence[fx.Node]) -> Iterable[fx.Node]:
        """The received values that a stage changes in place.

        The stage must copy them: autograd refuses to change a leaf.
        """
        written = self._written.get(stage, {})
        changed: dict[fx.Node, fx.Node] = {}
        for node in values:
            root = self._root[node]
            if root not in written:
                continue
            if root in changed:
                raise PartitionError(
                    f"stage {stage} changes {node.name!r} in place ({written[root].target}), which "
                    f"shares memory with {changed[root].name!r} from an earlier stage; memory "
                    "cannot be shared across stages: use an operation that makes a new tensor, or "
                    "move the split point"
                )
            changed[root] = node
        return changed.values()


def _aliased_nodes(node: fx.Node, *, written: bool) -> Iterator[fx.Node]:
    """The arguments that an operation writes to, or that its result may be a view of."""
    for value in aliased(node.target, node.args, node.kwargs, written=written):
        if isinstance(value, fx.Node):
            yield value


class _Builder:
    """Makes the graph of one stage."""

    def __init__(self, traced: fx.GraphModule, state: State) -> None:
        self._traced = traced
        self._state = state
        self._values: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[str, fx.Node] = {}
        self.graph = fx.Graph()

    def take_arguments(self) -> None:
        """Take the arguments of the whole module."""
        for node in self._traced.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = self.graph.node_copy(node)
        add_checks(self.graph, list(self._values.values()))

    def take(self, values: list[fx.Node], changed: Iterable[fx.Node]) -> None:
        """Take what the stage before returns; copy what this stage changes in place."""
        for node in values:
            self._values[node] = self.graph.placeholder(node.name)
            self._values[node].meta = dict(node.meta)
        self.clone(changed)

    def clone(self, values: Iterable[fx.Node]) -> None:
        """Go on with copies of some values."""
        clone = torch.ops.aten.clone.default
        for node in values:
            self._values[node] = self.graph.call_function(clone, (self._values[node],))
            self._values[node].meta = dict(node.meta)

    def copy(self, node: fx.Node) -> None:
        """Copy one operation, or the output of the whole module."""
        self._values[node] = self.graph.node_copy(
            node,
            lambda part: (
                self._attribute(part, node) if part.op == "get_attr" else self._values[part]
            ),
        )

    def return_(self, values: list[fx.Node]) -> None:
        """Return what the next stage takes."""
        given = tuple(self._values[node] for node in values)
        self.graph.output(given[0] if len(given) == 1 else given)

    def set_calling(self, *, first: bool, last: bool) -> None:
        """Take and return containers where the whole module does."""
        info = getattr(self._traced.graph._codegen, "pytree_info", None)
        if info is None or not (first or last):
            return
        names, in_spec = info.orig_args, info.in_spec
        if not first:
            names = [node.name for node in self.graph.find_nodes(op="placeholder")]
            in_spec = pytree.tree_structure((tuple(range(len(names))), {}))
        out_spec = info.out_spec if last else None
        self.graph.set_codegen(_CodeGen(_TreeInfo(names, in_spec, out_spec)))

    def _attribute(self, node: fx.Node, user: fx.Node) -> fx.Node:
        name = self._state.name_for(self._traced, str(node.target), user)
        if name not in self._attributes:
            made = self._attributes[name] = self.graph.create_node("get_attr", name)
            made.meta = dict(node.meta)
        return self._attributes[name]
