"""Direct calls of the autograd engine, and the sums of gradients that it does not do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from taktline.private import for_all, private
from taktline.sharding import local

SMALL = 8 * 2**20
"""The most bytes of a gradient whose addition takes longer to launch than to run.

Adding many larger ones at once is slower than one by one."""

# The call inside of torch.autograd.backward(), whose checks cost as much as the whole backward of a
# small stage, and are not needed here.
_engine = private("torch.autograd.Variable._execution_engine", "a quick backward", None)

add_all = for_all("torch._foreach_add_", torch.Tensor.add_)
"""Adds to many tensors in one call."""


def accumulate(
    roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[Any] = ()
) -> None:
    """Add gradients to the ``.grad`` of ``inputs``, or of all leaves, and free the graph."""
    if _engine is None:
        torch.autograd.backward(tuple(roots), tuple(gradients), inputs=tuple(inputs) or None)
        return
    _engine.run_backward(
        tuple(roots),
        tuple(gradients),
        False,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def add_to_grad(leaf: torch.Tensor, gradient: torch.Tensor, is_shared: bool = False) -> None:
    """Add to a leaf's ``.grad``, as the engine does; a shared gradient does not become it."""
    known = leaf.grad
    if known is not None:
        # By .data, if the gradient itself was differentiated.
        (known.data if known.requires_grad else known).add_(gradient)
    else:
        if type(gradient) is torch.Tensor and (
            gradient.stride() != leaf.stride() or gradient.is_conj()
        ):  # such as an expanded one, which cannot be added to
            gradient = torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)
        elif is_shared:
            gradient = gradient.clone()
        leaf.grad = gradient if leaf.grad_dtype is None else gradient.to(leaf.grad_dtype)


def add_to_grads(weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add to the ``.grad`` of weights; small plain gradients together, in one operation."""
    sums: list[torch.Tensor] = []
    new: list[torch.Tensor] = []
    for weight, gradient in zip(weights, gradients, strict=True):
        old = weight.grad
        if gradient is None:
            continue
        if old is None:
            add_to_grad(weight, gradient, is_shared=_shares(gradient, gradients))
        elif (
            type(old) is type(gradient) is torch.Tensor
            and not old.requires_grad
            and old.dtype == gradient.dtype
            and old.nbytes <= SMALL
        ):
            sums.append(old)
            new.append(gradient)
        else:
            add_to_grad(weight, gradient)
    if sums:
        add_all(sums, new)


def memory_of(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's memory; None for a wrapper, such as the result of a collective."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except RuntimeError:
        return None


def _shares(gradient: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> bool:
    """Whether another one of the gradients has, or may have, the same memory."""
    memory = memory_of(gradient)
    found = [memory_of(other) for other in gradients if other is not None]
    return len(found) > 1 and (memory is None or None in found or found.count(memory) > 1)


def is_own_hook(hook: object) -> bool:
    """Whether a hook is an object of this package: such hooks work in every kind of backward."""
    return type(hook).__module__.startswith("taktline.")
