"""The model of the demo, a small GPT, and its data: the source code of this package."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import taktline

CONTEXT = 64
_WIDTH = 96
_HEADS = 4


class GPT(nn.Module):
    """Predicts the next byte of a text; its head is its embedding."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.letters = nn.Embedding(256, _WIDTH)
        self.places = nn.Embedding(CONTEXT, _WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                _WIDTH, _HEADS, 4 * _WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, 256, bias=False)
        for embedding in (self.letters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.letters.weight

    def forward(self, text: Tensor) -> Tensor:
        """How likely each byte is to come next, at each place."""
        x = self.letters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        causal = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        for block in self.blocks:
            x = block(x, causal, is_causal=True)
        return self.head(self.norm(x))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of the next letters."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Text:
    """The package's own source code, and random passages of it."""

    def __init__(self) -> None:
        folder = Path(taktline.__file__).parent
        files = [file.read_bytes() for file in sorted(folder.rglob("*.py"))]
        self.files = len(files)
        self.letters = torch.frombuffer(bytearray(b"\n".join(files)), dtype=torch.uint8).long()

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Passages, and each of them one letter further on; the same ones for a step each time."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.letters) - CONTEXT, (size,), generator=generator)
        passages = torch.stack([self.letters[start : start + CONTEXT + 1] for start in starts])
        return passages[:, :-1], passages[:, 1:]
