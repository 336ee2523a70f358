"""The backward of a stage as functions, whole or in two halves, for code with its own graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from taktline import pytree
from taktline.checks import require_instances, require_iterable, require_whole, shown
from taktline.errors import SplitError
from taktline.stage.autograd_engine import accumulate
from taktline.stage.split_backward import Pending, Splitter

__all__ = ["stage_backward", "stage_backward_input", "stage_backward_weight"]


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: list[int] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Add up all gradients of a stage; returns those of its inputs.

    Args:
        stage_output: the output, or the loss; any nesting of tensors.
        output_grads: the gradients of its tensors in the same nesting; None for a loss.
        input_values: the inputs; the gradients of tensors among them are returned.
        outputs_with_grads_idxs: which outputs to begin with, if not all.

    >>> x = torch.ones(2, requires_grad=True)
    >>> stage_backward((x * 3).sum(), None, [x, "label"])
    (tensor([3., 3.]), None)
    """
    input_values = require_iterable("input_values", input_values, error=SplitError)
    outputs = pytree.tree_leaves(stage_output)
    gradients = [None] * len(outputs) if output_grads is None else pytree.tree_leaves(output_grads)
    if outputs_with_grads_idxs is not None:
        wanted = [
            require_whole("outputs_with_grads_idxs", index, least=0, error=SplitError)
            for index in require_iterable(
                "outputs_with_grads_idxs", outputs_with_grads_idxs, error=SplitError
            )
        ]
        if max(wanted, default=-1) >= min(len(outputs), len(gradients)):
            raise SplitError(
                f"outputs_with_grads_idxs names output {max(wanted)}, but there are "
                f"{len(outputs)} outputs and {len(gradients)} gradients"
            )
        outputs = [outputs[index] for index in wanted]
        gradients = [gradients[index] for index in wanted]
    roots, gradients = _roots(outputs, gradients)
    if roots:
        accumulate(roots, gradients)
    return tuple(x.grad if isinstance(x, torch.Tensor) else None for x in input_values)


def stage_backward_input(
    stage_outputs_or_loss: list[torch.Tensor],
    output_grads: list[torch.Tensor] | None,
    input_values: list[Any],
    weights: Iterator[nn.Parameter],
) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]]]:
    """The first half: returns the gradients of the inputs, and the state for the second half.

    >>> layer, x = nn.Linear(2, 2), torch.ones(3, 2, requires_grad=True)
    >>> _, groups = stage_backward_input([layer(x).sum()], None, [x], layer.parameters())
    >>> layer.weight.grad is None, layer.bias.grad
    (True, tensor([3., 3.]))
    >>> stage_backward_weight(layer.parameters(), groups)[0]
    tensor([[3., 3.],
            [3., 3.]])
    """
    input_values = require_iterable("input_values", input_values, error=SplitError)
    outputs = require_iterable("stage_outputs_or_loss", stage_outputs_or_loss, error=SplitError)
    gradients = (
        [None] * len(outputs)
        if output_grads is None
        else require_iterable("output_grads", output_grads, error=SplitError)
    )
    roots, gradients = _roots(outputs, gradients)
    inputs = [x for x in input_values if isinstance(x, torch.Tensor) and x.requires_grad]
    trainable = [weight for weight in _tensors("weights", weights) if weight.requires_grad]
    pending = Splitter().run_input(roots, gradients, inputs, trainable) if roots else None
    groups = [] if pending is None else [{"params": pending.weights, "pending": pending}]
    return tuple(x.grad if isinstance(x, torch.Tensor) else None for x in input_values), groups


def stage_backward_weight(
    weights: Iterator[nn.Parameter], param_groups: list[dict[str, Any]], retain_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """The second half: adds the gradients of the weights; returns their ``.grad``.

    ``retain_graph`` changes nothing: the first half has freed the graph.

    >>> layer, x = nn.Linear(1, 1, bias=False), torch.ones(2, 1)
    >>> _, groups = stage_backward_input([layer(x).sum()], None, [x], layer.parameters())
    >>> stage_backward_weight(layer.parameters(), groups)
    (tensor([[2.]]),)
    """
    parameters = _tensors("weights", weights)
    for group in require_iterable("param_groups", param_groups, error=SplitError):
        pending = group.pop("pending", None) if isinstance(group, dict) else None
        if not isinstance(pending, Pending):
            raise SplitError(
                "stage_backward_weight needs what stage_backward_input has given, once for each"
            )
        pending.run()
    return tuple(weight.grad for weight in parameters)


def _tensors(name: str, values: Any) -> list[torch.Tensor]:
    return require_instances(name, values, torch.Tensor, "a tensor", SplitError)


def _roots(
    outputs: Sequence[Any], gradients: Sequence[Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs that require a gradient, and their gradients; that of a loss is one."""
    if len(outputs) != len(gradients):
        raise SplitError(f"there are {len(outputs)} outputs, but {len(gradients)} gradients")
    roots: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    for output, gradient in zip(outputs, gradients, strict=True):
        if not isinstance(output, torch.Tensor) or not output.requires_grad:
            continue
        if gradient is None and output.numel() != 1:
            continue  # no gradient came for this output
        if gradient is not None and (
            not isinstance(gradient, torch.Tensor) or gradient.shape != output.shape
        ):
            raise SplitError(
                f"the gradient of an output of shape {list(output.shape)} must be a tensor of that "
                f"shape, not {shown(gradient)}"
            )
        roots.append(output)
        found.append(torch.ones_like(output) if gradient is None else gradient)
    return roots, found
