"""The autograd engine, called without detours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Variable

__all__ = ["accumulate", "add_to_grad", "add_to_grads"]

# What torch.autograd.backward() calls in the end. Its own checks and conversions cost as much as
# the whole backward of a small stage, and what they check is known here.
_run = Variable._execution_engine.run_backward  # pyright: ignore


def accumulate(
    roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[Any] = ()
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


def add_to_grad(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to a leaf's ``.grad``, as the engine does."""
    known = leaf.grad
    if known is not None:
        # By .data, should somebody have differentiated this gradient itself.
        (known.data if known.requires_grad else known).add_(gradient)
    else:
        leaf.grad = gradient if leaf.grad_dtype is None else gradient.to(leaf.grad_dtype)


def add_to_grads(leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """The same for many leaves, by one operation where they have gradients."""
    known = [leaf.grad for leaf in leaves]
    if any(each is None or each.requires_grad for each in known):
        for leaf, gradient in zip(leaves, gradients, strict=True):
            add_to_grad(leaf, gradient)
    else:
        torch._foreach_add_(known, gradients)  # pyright: ignore
