"""The module of one stage of a traced model."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.traced.state import State


class StageModule(fx.GraphModule):
    """A stage with a graph for training and one for evaluation.

    A trace is valid for one mode: dropout and batch norm depend on it. So ``train()`` and
    ``eval()`` change the graph.
    """

    def __init__(
        self,
        graphs: dict[bool, fx.Graph],
        training: bool,
        state: State,
        why_not: str,
    ) -> None:
        super().__init__(nn.Module(), fx.Graph(), "StageModule")
        state.install(self, set().union(*map(attributes_of, graphs.values())))
        self._graphs = graphs
        self._why_not = why_not
        self.training = training
        self.graph = graphs[training]

    def train(self, mode: bool = True) -> Self:
        """Change to the graph for training, or for evaluation."""
        if mode not in self._graphs:
            asked = "train()" if mode else "eval()"
            raise PartitionError(
                f"{asked} of a stage: its model could not be traced in that mode too: "
                f"{self._why_not}; call pipeline() on the model in the mode that you need"
            )
        super().train(mode)
        if self.graph is not self._graphs[mode]:
            self.graph = self._graphs[mode]
        return self

    def set_graph_device(self, device: torch.device) -> None:
        """Let the graphs create tensors, such as positions and masks, on a device."""

        def moved(part: Any) -> Any:
            return device if isinstance(part, torch.device) else part

        nested = [m.graph for m in self.modules() if isinstance(m, fx.GraphModule)]
        for graph in {*nested, *self._graphs.values()}:
            for node in graph.nodes:
                node.args, node.kwargs = map_aggregate((node.args, node.kwargs), moved)
        for module in self.modules():
            if isinstance(module, fx.GraphModule):
                module.recompile()

    def __deepcopy__(self, memo: dict[int, Any]) -> StageModule:
        made = StageModule.__new__(StageModule)
        memo[id(self)] = made
        memo.update({id(graph): _copied(graph) for graph in self._graphs.values()})
        for name, value in vars(self).items():
            # The graphs have the trees; torch copies them in a way that it has deprecated.
            if not isinstance(value, pytree.TreeSpec):
                vars(made)[name] = copy.deepcopy(value, memo)
        made.graph = made._graphs[self.training]
        return made


def attributes_of(graph: fx.Graph) -> set[str]:
    """The names of the attributes that a graph uses."""
    return {str(node.target) for node in graph.nodes if node.op == "get_attr"}


def _copied(graph: fx.Graph) -> fx.Graph:
    made = fx.Graph()
    made.output(made.graph_copy(graph, {}))
    made.set_codegen(graph._codegen)
    return made
