"""What the ranks train: a model that strikes where it is told to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WIDTH = 8
LUCK = "out of luck"


class Trap:
    """Strikes at one forward, backward or loss of a call."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.due: tuple[str, int] | None = None
        self.strike: Callable[[int | None], None] = lambda stage: None

    def arm(self, kind: str, number: int, strike: Callable[[int | None], None]) -> None:
        self.counts.clear()
        self.due, self.strike = (kind, number), strike

    def hit(self, kind: str, stage: int | None = None) -> None:
        self.counts[kind] += 1
        if self.due == (kind, self.counts[kind] - 1):
            self.due = None
            self.strike(stage)


class _Passes(torch.autograd.Function):
    """Nothing, but for what happens in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Block) -> Tensor:
        ctx.block = block
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.block.trap.hit("B", ctx.block.stage)
        return gradients[0], None


class Block(nn.Module):
    """A stage."""

    def __init__(self, stage: int, trap: Trap) -> None:
        super().__init__()
        self.stage, self.trap = stage, trap
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.trap.hit("F", self.stage)
        return _Passes.apply(x + self.narrow(torch.relu(self.wide(x))), self)


class Sour(Tensor):
    """A gradient that nobody can use."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(LUCK)


def in_parts(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A stage side by side on several ranks."""
    plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    return parallelize_module(block, mesh, plan)
