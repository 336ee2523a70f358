"""The backward of a stage, whole or in halves, as functions over an autograd graph.

Beside what torch has, gradients are those of a plain backward: also where a weight is used several
times, an operation has several outputs, or an output depends on weights alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.nn import Parameter

from taktline.compat.torch_pipelining._debug import map_debug_info
from taktline.compat.torch_pipelining._reverse import (
    Group,
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
    groups_meeting,
    reverse_closure,
)
from taktline.errors import SplitError, StageBackwardError
from taktline.stage.engine import add_to_grad

__all__ = [
    "_autograd_grad_for_inputs",
    "_get_grad_fn_or_grad_acc",
    "_null_coalesce_accumulate",
    "construct_reverse_graph",
    "get_param_groups",
    "reverse_closure",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
]

logger = logging.getLogger("torch.distributed.pipelining._backward")

Gradients = tuple[torch.Tensor | None, ...]


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Iterable[Any],
    outputs_with_grads_idxs: list[int] | None = None,
) -> Gradients:
    """Add up all gradients of a stage; gives those of its inputs, and takes them off these.

    >>> x = torch.ones(2, requires_grad=True)
    >>> stage_backward((x * 3).sum(), None, [x, "label"]), x.grad
    ((tensor([3., 3.]), None), None)
    """
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[index] for index in outputs_with_grads_idxs]
        output_grads = [output_grads[index] for index in outputs_with_grads_idxs]
    try:
        pairs = list(_pairs(stage_output, output_grads))
        if pairs:
            torch.autograd.backward([p[0] for p in pairs], grad_tensors=[p[1] for p in pairs])
        gradients: list[torch.Tensor | None] = []
        for value in input_values:
            gradients.append(_grad_of(value) if isinstance(value, torch.Tensor) else None)
            if isinstance(value, torch.Tensor):
                value.grad = None
    except Exception as error:
        raise StageBackwardError(
            "\n        Failed to run stage backward:"
            f"\n        Stage output: {map_debug_info(stage_output)}"
            f"\n        Output gradient: {map_debug_info(output_grads)}"
            f"\n        Input: {map_debug_info(input_values)}\n        "
        ) from error
    return tuple(gradients)


def _pairs(output: Any, gradient: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """Each tensor of an output that wants a gradient, with that gradient."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad or output.grad_fn is not None:
            yield output, gradient
    elif isinstance(output, tuple | list):
        if gradient is None:
            return
        if len(gradient) != len(output):
            raise SplitError(f"there are {len(output)} outputs, but {len(gradient)} gradients")
        for value, its_gradient in zip(output, gradient, strict=True):
            yield from _pairs(value, its_gradient)
    elif isinstance(output, dict):
        if gradient is None:
            return
        if set(output) != set(gradient):
            raise SplitError(f"outputs are {list(output)}, but gradients {list(gradient)}")
        for key, value in output.items():
            yield from _pairs(value, gradient[key])


def _grad_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its gradient; asking for that of what keeps none would warn."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _null_coalesce_accumulate(lhs: Any, rhs: Any) -> Any:
    """The sum of two gradients, of which either may be missing.

    >>> _null_coalesce_accumulate(None, 1)
    1
    """
    if lhs is None or rhs is None:
        return rhs if lhs is None else lhs
    return torch.add(lhs, rhs)


def _autograd_grad_for_inputs(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[Any],
    grad_outputs: Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> Gradients:
    """The gradients of those inputs that can have one, None for all others.

    >>> x = torch.ones(2, requires_grad=True)
    >>> _autograd_grad_for_inputs([x.sum()], [x, "label"])
    (tensor([1., 1.]), None)
    """
    wanted = [isinstance(value, torch.Tensor) and value.requires_grad for value in inputs]
    chosen = [value for value, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]
    if not chosen:
        return (None,) * len(wanted)
    found = iter(
        torch.autograd.grad(
            outputs, chosen, grad_outputs, retain_graph=retain_graph, allow_unused=allow_unused
        )
    )
    return tuple(next(found) if is_wanted else None for is_wanted in wanted)


def stage_backward_input(
    stage_outputs_or_loss: Sequence[torch.Tensor],
    output_grads: Sequence[torch.Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterator[Parameter],
) -> tuple[Gradients, list[Group]]:
    """The first half: gradients of the inputs, and what each group of weights needs for its own.

    The outputs are detached: what is left of the graph hangs on the groups.

    >>> layer, x = torch.nn.Linear(2, 2), torch.ones(3, 2, requires_grad=True)
    >>> _, groups = stage_backward_input([layer(x).sum()], None, [x], layer.parameters())
    >>> layer.bias.grad is None, [len(group["params"]) for group in groups]
    (True, [2])
    >>> stage_backward_weight(layer.parameters(), groups)[1]
    tensor([3., 3.])
    """
    given = output_grads or [None] * len(stage_outputs_or_loss)
    roots: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for output, gradient in zip(stage_outputs_or_loss, given, strict=True):
        if isinstance(output, torch.Tensor) and output.requires_grad:
            roots.append(output)
            gradients.append(torch.ones_like(output) if gradient is None else gradient)
    if not roots:
        return (None,) * len(input_values), []
    groups = _groups(roots, gradients, input_values, weights)
    with ExitStack() as hooks:
        for group in groups:
            for place, node in enumerate(group["intermediates"]):
                if group["grads"][place] is None:
                    handle = node.register_prehook(_keeper(group["grads"], place))
                    hooks.callback(handle.remove)
        found = _autograd_grad_for_inputs(
            roots, input_values, gradients, retain_graph=True, allow_unused=True
        )
    for value, gradient in zip(input_values, found, strict=True):
        if gradient is not None:
            known = _grad_of(value)
            value.grad = gradient if known is None else known + gradient
    for root in roots:
        if not root._is_view() and root.grad_fn is not None:
            root.detach_()
    return found, groups


def _keeper(kept: list[Any], place: int) -> Callable[[Any], None]:
    def keep(gradients: Any) -> None:
        kept[place] = gradients

    return keep


def _groups(
    roots: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[Any],
    weights: Iterable[Parameter],
) -> list[Group]:
    """The groups, each with its intermediates, and with the edges at which W has to stop."""
    edges = [torch.autograd.graph.get_gradient_edge(root) for root in roots]
    reverse = construct_reverse_graph([edge.node for edge in edges])
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    starts = [node for node in map(_get_grad_fn_or_grad_acc, tensors) if node is not None]
    part, _ = reverse_closure(starts, set(), reverse)
    # A root that nothing of the inputs comes to has its gradient already.
    alone = {edge.node: [] for edge in edges if edge.node not in part}
    for edge, gradient in zip(edges, gradients, strict=True):
        if edge.node in alone:
            alone[edge.node].append((edge.output_nr, gradient))
    params = [node for node in map(_get_grad_fn_or_grad_acc, weights) if node is not None]
    groups = groups_meeting(part, set(alone), params, reverse)
    for group in groups:
        group["intermediates"] = list(group["intermediates"])
        group["grads"] = [_tuple_of(alone.get(node)) for node in group["intermediates"]]
        group["stops"] = [
            tuple(i for i, (below, _) in enumerate(node.next_functions) if below in part)
            for node in group["intermediates"]
        ]
    return groups


def _tuple_of(given: list[tuple[int, torch.Tensor]] | None) -> Gradients | None:
    """The gradients of a node's outputs by their numbers, of which one may come twice."""
    if not given:
        return None
    result: list[torch.Tensor | None] = [None] * (max(number for number, _ in given) + 1)
    for number, gradient in given:
        result[number] = _null_coalesce_accumulate(result[number], gradient)
    return tuple(result)


def stage_backward_weight(
    weights: Iterator[Parameter], param_groups: list[Group], retain_graph: bool = False
) -> Gradients:
    """The second half: the gradients of the weights; gives what is in their ``.grad`` then."""
    by_node = {node: w for w in weights if (node := _get_grad_fn_or_grad_acc(w)) is not None}
    # Those with several intermediates first: their passes go through those of others.
    for group in sorted(param_groups, key=lambda g: -len(g.get("intermediates", ()))):
        if "grads" not in group:
            raise SplitError(
                "stage_backward_weight needs what stage_backward_input has given, once for each"
            )
        found = _weight_gradients(group, retain_graph)
        for node, gradient in zip(group["params"], found, strict=True):
            if gradient is not None and node in by_node:
                add_to_grad(by_node[node], gradient)
        for key in ("intermediates", "grads", "stops"):
            group.pop(key, None)
    return tuple(weight.grad for weight in by_node.values())


def _weight_gradients(group: Group, retain_graph: bool) -> Gradients:
    """One pass from the intermediates of a group to its parameters."""
    edges: list[GradientEdge] = []
    gradients: list[torch.Tensor] = []
    with ExitStack() as hooks:
        nodes: list[Node] = group["intermediates"]
        for place, (node, given) in enumerate(zip(nodes, group["grads"], strict=True)):
            for number, gradient in enumerate(given or ()):
                if gradient is not None:
                    edges.append(GradientEdge(node, number))
                    gradients.append(gradient)
            if len(nodes) > 1 and group["stops"][place]:
                # Each has its whole gradient already: what it would hand to another below it
                # would be counted twice.
                hooks.callback(node.register_hook(_stopper(group["stops"][place])).remove)
        if not edges:
            return (None,) * len(group["params"])
        ends = [GradientEdge(node, 0) for node in group["params"]]
        # Between several there may be what other groups still need.
        keep = retain_graph or len(nodes) > 1
        return torch.autograd.grad(edges, ends, gradients, retain_graph=keep, allow_unused=True)


def _stopper(stops: tuple[int, ...]) -> Callable[[Any, Any], Gradients]:
    def stop(gradients: Any, _: Any) -> Gradients:
        return tuple(None if i in stops else gradient for i, gradient in enumerate(gradients))

    return stop
