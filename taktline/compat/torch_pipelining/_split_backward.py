"""The backward of a stage in two halves, over torch's groups of parameters.

::

    output ◀── Addmm ◀── Relu ◀── Addmm ◀── x      the inputs' part: all that leads to x
                 ▲                  ▲
                 T ◀ weight         T ◀ weight     each parameter meets it at an intermediate

The second half needs only the gradients that reach the intermediates in the first half. Gradients
are those of a plain backward, also where a weight is used several times, an operation has several
outputs, or an output depends only on weights; there torch's own halves differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter

from taktline.compat.torch_pipelining import _backward as _torchs
from taktline.errors import SplitError, StageBackwardError
from taktline.sharding import is_sharded
from taktline.stage.autograd_engine import add_to_grad

Gradients = tuple[torch.Tensor | None, ...]
Reverse = Mapping[Node, Sequence[Node]]
Group = dict[str, Any]

reverse_closure, _node_of = _torchs.reverse_closure, _torchs._get_grad_fn_or_grad_acc


def get_param_groups(
    inputs: list[Node], params: list[Node], reverse_edges_dict: Reverse
) -> list[Group]:
    """Groups of parameters, each with the intermediates where they meet the inputs' part.

    No two groups share an intermediate. A parameter without any is in no group.
    """
    part, _ = reverse_closure(inputs, set(), reverse_edges_dict)
    return groups_meeting(part, set(), params, reverse_edges_dict)


def groups_meeting(
    part: set[Node], ends: set[Node], params: Sequence[Node], reverse: Reverse
) -> list[Group]:
    """The groups of parameters by where they meet a part of the graph, or reach its ends."""
    groups: list[Group] = []
    for param in params:
        closure, met = reverse_closure([param], part, reverse)
        met |= closure & ends
        if not met:
            continue
        joined = [group for group in groups if group["intermediates"] & met]
        group: Group = {"params": {param}, "intermediates": met}
        for other in joined:
            group["params"] |= other["params"]
            group["intermediates"] |= other["intermediates"]
        # In the place of the first group that it joins.
        place = groups.index(joined[0]) if joined else len(groups)
        groups = [other for other in groups if other not in joined]
        groups.insert(place, group)
    return groups


def stage_backward_input(
    stage_outputs_or_loss: Sequence[torch.Tensor | GradientEdge],
    output_grads: Sequence[torch.Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterator[Parameter],
) -> tuple[Gradients, list[Group]]:
    """The first half: gradients of the inputs, and the groups of weights for the second half.

    The outputs are detached, so that only the groups hold the graph, unless the second half may
    need them. An output may be given by its GradientEdge, and be freed itself.

    >>> layer, x = torch.nn.Linear(2, 2), torch.ones(3, 2, requires_grad=True)
    >>> _, groups = stage_backward_input([layer(x).sum()], None, [x], layer.parameters())
    >>> layer.bias.grad is None, [len(group["params"]) for group in groups]
    (True, [2])
    >>> stage_backward_weight(layer.parameters(), groups)[1]
    tensor([3., 3.])
    """
    given = (stage_outputs_or_loss, output_grads, input_values)
    try:
        return _first_half(*given, weights)
    except Exception as error:
        outputs, gradients, inputs = map(_torchs.map_debug_info, given)
        raise StageBackwardError(
            f"Failed to run stage backward input: {error}\n"
            f"Stage output: {outputs}\nOutput gradient: {gradients}\nInput: {inputs}"
        ) from error


def _first_half(outputs: Any, output_grads: Any, input_values: Any, weights: Any) -> Any:
    given = output_grads or [None] * len(outputs)
    roots: list[Any] = []
    gradients: list[torch.Tensor] = []
    for output, gradient in zip(outputs, given, strict=True):
        if isinstance(output, GradientEdge):
            if gradient is None:
                raise SplitError(
                    "an output passed as its GradientEdge has no shape, so its gradient is needed; "
                    "pass it in output_grads"
                )
        elif not isinstance(output, torch.Tensor) or not output.requires_grad:
            continue
        roots.append(output)
        gradients.append(torch.ones_like(roots[-1]) if gradient is None else gradient)
    if not roots:
        return (None,) * len(input_values), []
    groups, arriving, needed = _groups(roots, gradients, input_values, weights)
    wanted = [value for value in input_values if _wants_gradient(value)]
    # Not by hooks of nodes: these get a gradient after the hooks of tensors, which W runs, too.
    edges = [
        GradientEdge(node, number)
        for group in groups
        for node in group["intermediates"]
        if node not in arriving
        for number in range(len(node._input_metadata))
    ]
    keeping = {"retain_graph": True, "allow_unused": True}
    ends = [*wanted, *edges]
    made = iter(torch.autograd.grad(roots, ends, gradients, **keeping) if wanted else ())
    found = tuple(next(made) if _wants_gradient(value) else None for value in input_values)
    for edge, gradient in zip(edges, made, strict=True):
        arriving.setdefault(edge.node, []).append(gradient)
    for group in groups:
        group["grads"] = [tuple(arriving[node]) for node in group["intermediates"]]
    for value, gradient in zip(input_values, found, strict=True):
        if gradient is not None:
            known = _grad_of(value)
            value.grad = gradient if known is None else known + gradient
    for root in roots:
        if isinstance(root, torch.Tensor) and root.grad_fn not in needed and not root._is_view():
            root.detach_()
    return found, groups


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _grad_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a tensor; reading that of a tensor that retains none would warn."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _groups(
    roots: Sequence[torch.Tensor | GradientEdge],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[Any],
    weights: Iterable[Parameter],
) -> tuple[list[Group], dict[Node, list[torch.Tensor | None]], set[Node | None]]:
    """The groups, each with its intermediates, and the edges at which the second half stops.

    And the gradients of roots that do not depend on the inputs; and the nodes whose results the
    second half may need, which other nodes have saved.
    """
    edges = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
    reverse = _torchs.construct_reverse_graph([edge.node for edge in edges])
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    starts = [node for node in map(_node_of, tensors) if node is not None]
    part, _ = reverse_closure(starts, set(), reverse)
    alone: dict[Node, list[torch.Tensor | None]] = {}
    for edge, gradient in zip(edges, gradients, strict=True):
        if edge.node not in part:
            known = alone.setdefault(edge.node, [None] * len(edge.node._input_metadata))
            before = known[edge.output_nr]
            known[edge.output_nr] = gradient if before is None else before + gradient
    params = [node for node in map(_node_of, weights) if node is not None]
    groups = groups_meeting(part, set(alone), params, reverse)
    for group in groups:
        group["intermediates"] = list(group["intermediates"])
        group["stops"] = [
            tuple(i for i, (below, _) in enumerate(node.next_functions) if below in part)
            for node in group["intermediates"]
        ]
    met = (node for group in groups for node in group["intermediates"])
    return groups, alone, {None, *met, *(node for node, users in reverse.items() if users)}


def stage_backward_weight(
    weights: Iterator[Parameter], param_groups: list[Group], retain_graph: bool = False
) -> Gradients:
    """The second half: adds the gradients of the weights to their ``.grad``, and returns these."""
    by_node = {node: w for w in weights if (node := _node_of(w)) is not None}
    # Groups with several intermediates first: their passes go through those of others.
    for group in sorted(param_groups, key=lambda g: -len(g.get("intermediates", ()))):
        if "grads" not in group:
            raise SplitError(
                "stage_backward_weight needs what stage_backward_input has returned, each once"
            )
        found = _weight_gradients(group, retain_graph)
        for node, gradient in zip(group["params"], found, strict=True):
            if gradient is not None and node in by_node:
                weight = by_node[node]
                # Several weights, or a received buffer, may share the memory of a gradient.
                add_to_grad(weight, _copy(gradient) if weight.grad is None else gradient)
        for key in ("intermediates", "grads", "stops"):
            group.pop(key, None)
    return tuple(weight.grad for weight in by_node.values())


def _copy(gradient: torch.Tensor) -> torch.Tensor:
    """A copy, placed as it is; the clone of a DTensor would sum up what is partial."""
    if not is_sharded(gradient):
        return gradient.clone()
    place = (gradient.device_mesh, gradient.placements)
    shape = {"shape": gradient.shape, "stride": gradient.stride()}
    return type(gradient).from_local(gradient.to_local().clone(), *place, run_check=False, **shape)


def _weight_gradients(group: Group, retain_graph: bool) -> Gradients:
    """One pass from the intermediates of a group to its parameters."""
    edges: list[GradientEdge] = []
    gradients: list[torch.Tensor] = []
    with ExitStack() as hooks:
        nodes: list[Node] = group["intermediates"]
        for place, (node, given) in enumerate(zip(nodes, group["grads"], strict=True)):
            for number, gradient in enumerate(given):
                if gradient is not None:
                    edges.append(GradientEdge(node, number))
                    gradients.append(gradient)
            if len(nodes) > 1 and group["stops"][place]:
                # Each has its whole gradient already. A gradient that one passes to another below
                # it would count twice.
                stop = partial(_without, group["stops"][place])
                hooks.callback(node.register_hook(stop).remove)
        if not edges:
            return (None,) * len(group["params"])
        ends = [GradientEdge(node, 0) for node in group["params"]]
        # Other groups may still need the graph between several intermediates.
        keep = retain_graph or len(nodes) > 1
        return torch.autograd.grad(edges, ends, gradients, retain_graph=keep, allow_unused=True)


def _without(stops: Sequence[int], gradients: Gradients, _: Any) -> Gradients:
    return tuple(None if i in stops else gradient for i, gradient in enumerate(gradients))
