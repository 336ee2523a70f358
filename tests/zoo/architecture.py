"""What the zoo knows of an architecture: how to make a small model of it, and what it is fed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Inputs: TypeAlias = tuple[Any, ...] | dict[str, Any]
"""Positional arguments of a call, or keywords."""


@dataclass(frozen=True)
class Architecture:
    """One model of the zoo; the same values each time it is made."""

    name: str
    kind: str
    """The heading that it stands under."""
    build: Callable[[], nn.Module]
    feed: Callable[[int], Inputs]
    """The arguments of a batch with so many rows."""
    needs: str = ""
    """A library that it is from, if that is not always installed."""

    def make(self) -> nn.Module:
        """The model, in training, without dropout."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build()
            _spread(model)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif hasattr(module, "dropout_prob"):  # as diffusers drops labels
                module.dropout_prob = 0.0  # pyright: ignore[reportArgumentType]
        return model.train()

    def call(self, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords of a batch."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            inputs = self.feed(rows)
        return (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)


def loss_of(output: Any, target: Tensor) -> Tensor:
    """A loss that all of an output has a part in, whatever it is."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    parts = [_part(leaf) for leaf in leaves if leaf.requires_grad]
    return torch.stack(parts).sum() * target.mean()


def _part(leaf: Tensor) -> Tensor:
    """Not the squares alone: after a norm their sum is always the same."""
    weights = torch.cos(torch.arange(leaf.numel(), dtype=torch.float32)).view(leaf.shape)
    return (leaf.float().square() + weights * leaf.float()).mean()


@torch.no_grad()
def _spread(model: nn.Module) -> None:
    """Large weights, so that every one of them matters, also those that nobody initialises."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.2)
