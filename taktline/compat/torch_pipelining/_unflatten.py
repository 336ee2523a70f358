"""A module from a graph."""

from __future__ import annotations

from torch import fx, nn

__all__ = ["_outline_submodules"]


def _outline_submodules(orig_graph: fx.Graph) -> fx.GraphModule:
    """A module that runs a graph, with the parameters of whoever has it under the same names.

    >>> traced = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    >>> list(_outline_submodules(traced.graph).state_dict())
    ['0.weight', '0.bias']
    """
    graph = fx.Graph()
    output = graph.graph_copy(orig_graph, {})
    graph.output(output)
    graph._codegen = orig_graph._codegen
    return fx.GraphModule(orig_graph.owning_module or nn.Module(), graph)
