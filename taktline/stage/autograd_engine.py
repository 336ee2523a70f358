"""Direct calls of the autograd engine, and the sums of gradients that it does not do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Variable

__all__ = ["SMALL", "accumulate", "add_all", "add_to_grad", "add_to_grads", "is_own_hook"]

SMALL = 4 * 2**20
"""The most bytes of a gradient whose addition takes longer to launch than to run.

Adding many larger ones at once is slower than one by one."""

# The call inside of torch.autograd.backward(), whose checks cost as much as the whole backward of a
# small stage, and are not needed here.
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
        # By .data, if the gradient itself was differentiated.
        (known.data if known.requires_grad else known).add_(gradient)
    else:
        leaf.grad = gradient if leaf.grad_dtype is None else gradient.to(leaf.grad_dtype)


def add_to_grads(leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Add to the ``.grad`` of many leaves, in few operations if all have gradients."""
    known = [leaf.grad for leaf in leaves]
    ready = [each for each in known if each is not None and not each.requires_grad]
    if len(ready) == len(known):
        add_all(ready, gradients)
        return
    for leaf, gradient in zip(leaves, gradients, strict=True):
        add_to_grad(leaf, gradient)


def add_all(buffers: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Add gradients to buffers, small ones of the same types in one operation."""
    alike: defaultdict[object, tuple[list[torch.Tensor], list[torch.Tensor]]]
    alike = defaultdict(lambda: ([], []))
    for buffer, gradient in zip(buffers, gradients, strict=True):
        if buffer.nbytes > SMALL:
            buffer.add_(gradient)
            continue
        kind = type(buffer), buffer.dtype, type(gradient), gradient.dtype
        alike[kind][0].append(buffer)
        alike[kind][1].append(gradient)
    for ours, theirs in alike.values():
        torch._foreach_add_(ours, theirs)  # pyright: ignore[reportPrivateImportUsage]


def is_own_hook(hook: object) -> bool:
    """Whether a hook is an object of this package: such hooks work in every kind of backward."""
    return type(hook).__module__.startswith("taktline.")
