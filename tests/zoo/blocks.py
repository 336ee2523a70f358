"""What several models of the zoo are made of, and what they are fed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, HEADS, DEPTH, LENGTH = 61, 16, 4, 8, 10


class Attention(nn.Module):
    """Of all with all, or with those before; of a row with another if there is one."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.causal = causal

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        key, value = self.key_value(x if other is None else other).chunk(2, -1)
        heads = [
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query(x), key, value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


def mlp(width: int = WIDTH) -> nn.Sequential:
    """Wide and narrow again."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Block(nn.Module):
    """Attention and an MLP behind norms."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(causal)
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def tokens(rows: int) -> tuple[Tensor, ...]:
    """Texts."""
    return (torch.randint(WORDS, (rows, LENGTH)),)


def image(rows: int, size: int = 16) -> tuple[Tensor, ...]:
    """Images."""
    return (torch.randn(rows, 3, size, size),)


def features(rows: int) -> tuple[Tensor, ...]:
    """Numbers."""
    return (torch.randn(rows, LENGTH, 8),)
