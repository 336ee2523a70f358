"""Direct calls of the autograd engine, and the sums of gradients that it does not do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from taktline.private import for_all, private

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


class Sums:
    """Adds gradients to those that weights have: small ones together, in one operation.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.ones(2)
    >>> results = [None, torch.ones(2)]
    >>> Sums({1: weight}).add(results)
    >>> results, weight.grad
    ([None, None], tensor([2., 2.]))
    """

    def __init__(self, weights: Mapping[int, torch.Tensor]) -> None:
        """``weights`` are by the places of their gradients in a list."""
        self._groups: dict[tuple[torch.dtype, bool], list[tuple[int, torch.Tensor]]] = {}
        for place, weight in weights.items():
            kind = weight.dtype, weight.nbytes <= SMALL
            self._groups.setdefault(kind, []).append((place, weight))

    def add(self, gradients: list[Any]) -> None:
        """Add gradients, and take them out of the list; those that do not fit stay in it."""
        for (dtype, is_small), group in self._groups.items():
            known = [weight.grad for _, weight in group]
            new = [gradients[place] for place, _ in group]
            if not (_are_plain(known, dtype) and set(map(type, new)) == {torch.Tensor}):
                continue
            if is_small:
                add_all(known, new)
            else:
                for each, gradient in zip(known, new, strict=True):
                    each.add_(gradient)  # pyright: ignore
            for place, _ in group:
                gradients[place] = None


def _are_plain(tensors: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether all are tensors of a type without a graph; as quick as Python can find out."""
    return (
        set(map(type, tensors)) == {torch.Tensor}
        and set(map(_dtype, tensors)) == {dtype}
        and not any(map(_requires_grad, tensors))
    )


_dtype, _requires_grad = attrgetter("dtype"), attrgetter("requires_grad")


def is_own_hook(hook: object) -> bool:
    """Whether a hook is an object of this package: such hooks work in every kind of backward."""
    return type(hook).__module__.startswith("taktline.")
