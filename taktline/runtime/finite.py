"""Finds the stage and micro-batch that first produce a value that is not finite."""

from __future__ import annotations

from typing import Any

import torch

from taktline import pytree
from taktline.sharding import local
from taktline.stage import PipelineStage
from taktline.stage.names import named_parameters


def require_finite(what: str, value: Any, stage: PipelineStage, given: Any) -> None:
    """Raise if a value of a stage is not finite; the program adds the stage and the micro-batch.

    Tensors without a gradient may be infinite, as masks are.
    """
    for tensor in _numbers(value):
        if text := _fault(tensor, infinite=not tensor.requires_grad):
            raise FloatingPointError(f"{what} has {text}; {_cause(stage, given)}")


def require_finite_loss(loss: torch.Tensor, stage: PipelineStage, given: Any) -> None:
    """Raise if a loss of a stage is not finite."""
    if text := _fault(loss):
        raise FloatingPointError(f"the loss has {text}; {_cause(stage, given)}")


def _cause(stage: PipelineStage, given: Any) -> str:
    """Where a value that is not finite may come from, in words."""
    for name, parameter in named_parameters(stage.submod).items():
        if text := _fault(parameter):
            return f"parameter {name} has {text}, from before this step: load a checkpoint"
    for tensor in _numbers(given):
        if text := _fault(tensor, infinite=not stage.is_first):
            return f"what it was computed from has {text}: look at the batch"
    return "the parameters of the stage, and what it was given, are finite"


def _numbers(value: Any) -> list[torch.Tensor]:
    leaves = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]


def _fault(tensor: torch.Tensor, *, infinite: bool = False) -> str:
    """What is wrong with a tensor, in words; waits for a GPU."""
    numbers = local(tensor.detach())
    if numbers.dtype.itemsize == 1:
        numbers = numbers.float()  # 8-bit floats have few operations
    wrong = torch.isnan(numbers) if infinite else ~torch.isfinite(numbers)
    if not bool(wrong.any()):
        return ""
    kind = "nan" if bool(torch.isnan(numbers).any()) else "inf"
    return f"{kind} ({int(wrong.sum()):,} of {numbers.numel():,} numbers)"
