"""The backward of one micro-batch through one stage: whole, or split into I and W."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import Variable

__all__ = ["accumulate", "input_gradients"]

# What torch.autograd.backward() calls in the end. Its own checks and conversions cost as much as
# the whole backward of a small stage, and what they check is known here.
_run = Variable._execution_engine.run_backward  # pyright: ignore


def accumulate(
    roots: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor] = (),
) -> None:
    """Add gradients to the ``.grad`` of ``inputs``, or of all leaves, and free the graph."""
    _run(
        tuple(roots),
        tuple(gradients),
        False,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def input_gradients(
    roots: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """The gradients of a stage's inputs; the graph stays, for the weights."""
    return list(
        _run(
            tuple(roots),
            tuple(gradients),
            True,
            False,
            tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    )
