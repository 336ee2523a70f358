"""A GPT from scratch, trained on the text of this file.

python examples/gpt.py                               # four ranks in this process
torchrun --nproc-per-node 4 examples/gpt.py          # a process each
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--schedule", default="zbv")
parser.add_argument("--microbatches", type=int, default=8)
parser.add_argument("--steps", type=int, default=30)
options = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.attention(self.norm1(x)).chunk(3, dim=-1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers: int = 8, width: int = 64, heads: int = 4, context: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied across the pipeline

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Passages from anywhere in the text, and the letters that follow."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    for _ in range(options.steps):
        starts = torch.randint(len(text) - 33, (4 * options.microbatches,))
        passages = torch.stack([text[start : start + 33] for start in starts])
        yield passages[:, :-1], passages[:, 1:]


torch.manual_seed(0)
pipe = tl.Pipeline(
    GPT(),
    example=(torch.zeros(4, 32, dtype=torch.long),),  # a micro-batch
    schedule=options.schedule,
    microbatches=options.microbatches,
    loss_fn=loss_fn,
    ranks=4,
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
if pipe.is_first:
    print(pipe)
# One rank reads, and hands each batch to the others.
for step, (tokens, targets) in enumerate(pipe.loader(batches())):
    loss = pipe.step(tokens, target=targets)
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if pipe.is_first and (step + 1) % 10 == 0:
        print(f"step {step + 1}: loss {loss:.3f}")
