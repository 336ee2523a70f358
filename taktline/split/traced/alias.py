"""Values that are changed in place after they have crossed a boundary."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from taktline.errors import PartitionError

__all__ = ["Aliases"]


class Aliases:
    """Which values of a graph share memory, and which operations write to it."""

    def __init__(self, stages: Mapping[fx.Node, int]) -> None:
        self._root: dict[fx.Node, fx.Node] = {}
        self._written: dict[int, dict[fx.Node, fx.Node]] = {}
        for node, stage in stages.items():
            self._root[node] = self._find_root(node)
            for target in _arguments(node, written=True):
                root = self._root.get(target, target)
                self._written.setdefault(stage, {})[root] = node

    def _find_root(self, node: fx.Node) -> fx.Node:
        if node.target is operator.getitem:
            # A part of a result: of chunk() a view of the argument, of max() a tensor of its own.
            whole = node.all_input_nodes[0]
            root = self._root.get(whole, whole)
            return node if root is whole else root
        viewed = next(_arguments(node, written=False), None)
        return node if viewed is None else self._root.get(viewed, viewed)

    def require_own_buffers(self, stages: Mapping[fx.Node, int]) -> None:
        """Raise if a stage changes a parameter or buffer that another one uses too.

        On ranks of their own, the other one would not notice.
        """
        for stage, written in self._written.items():
            for root, node in written.items():
                users = sorted({stages[user] for user in root.users if user in stages} - {stage})
                if root.op == "get_attr" and users:
                    raise PartitionError(
                        f"stage {stage} changes {str(root.target)!r} ({node.target}), which stage "
                        f"{users[0]} uses too; move the split point so that one stage does both"
                    )

    def changed(self, stage: int, values: Sequence[fx.Node]) -> set[fx.Node]:
        """Those of the values that come into a stage which it changes in place.

        Autograd refuses to change what a stage is given; a copy can be changed.
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
        return set(changed.values())


def _arguments(node: fx.Node, *, written: bool) -> Iterator[fx.Node]:
    """The arguments that an operation writes to, or those that its result is a view of."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is None or (written and not argument.alias_info.is_write):
            continue
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, fx.Node):
                yield part
