"""The gradients of modules, compared."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["gradients", "require_same"]


def gradients(*modules: nn.Module) -> dict[str, Tensor]:
    """The gradients of all parameters that have one, by each of their names."""
    named = (pair for m in modules for pair in m.named_parameters(remove_duplicate=False))
    return {name: p.grad for name, p in named if p.grad is not None}


def require_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise unless both have the same gradients, to the last bit."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
