"""The loss that a model returns itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from taktline.errors import LossError

_OWN = "the model's own loss"
"""Stands in the place of a target."""

_NEEDED = (
    "step() trains, so it needs a loss: Pipeline(…, loss_fn=…) for an output and a target, or a "
    "model that returns one itself, as those of transformers do with labels=…"
)


def with_own_loss(target: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The target and the options of a call to a pipeline without ``loss_fn``.

    A function for ``loss_weights`` is called with the labels of a micro-batch.
    """
    if target is not None or options.get("target_mbs") is not None:
        return target, options
    weights = options.get("loss_weights")
    if not callable(weights):
        return (_OWN, None), options
    weighed = {**options, "loss_weights": lambda own: weights(own[1])}
    return (_OWN, options.get("labels")), weighed


def loss_in_output(output: Any, target: Any) -> torch.Tensor:
    """The loss in the output of a model: itself, its ``loss``, or the only number in a tuple.

    >>> float(loss_in_output({"loss": torch.tensor(2.0)}, (_OWN, None)))
    2.0
    >>> float(loss_in_output((torch.zeros(3, 4), torch.tensor(2.0)), (_OWN, None)))
    2.0
    """
    if not (isinstance(target, tuple) and target and isinstance(target[0], str)):
        raise LossError(f"there is a target, but no loss_fn; {_NEEDED}")
    if isinstance(output, torch.Tensor):
        found = [output]
    elif isinstance(output, Mapping):
        found = [output.get("loss")]
    elif hasattr(output, "loss"):
        found = [output.loss]
    else:
        found = output if isinstance(output, tuple | list) else []
    numbers = [x for x in found if isinstance(x, torch.Tensor) and x.numel() == 1]
    if len(numbers) != 1:
        several = "several numbers" if numbers else "no loss"
        raise LossError(f"the model returns {several} in its {type(output).__name__}; {_NEEDED}")
    return numbers[0]
