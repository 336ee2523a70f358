"""Activation checkpointing: blocks keep only their inputs, and run again in the backward.

python examples/checkpointing.py                       # two ranks in this process
torchrun --nproc-per-node 2 examples/checkpointing.py  # a process each
"""

import argparse

import torch
from torch import nn

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", choices=["none", "blocks", "attention"], default="blocks")
parser.add_argument("--steps", type=int, default=5)
options = parser.parse_args()


class Model(nn.Module):
    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def attention_only(name: str, module: nn.Module) -> bool:
    """An own policy: asked for every submodule, from the outside in."""
    return isinstance(module, nn.MultiheadAttention)


torch.manual_seed(0)
tokens = torch.randint(100, (16, 24))
pipe = tl.Pipeline(
    Model(),
    example=(tokens[:2],),
    microbatches=8,
    loss_fn=lambda output, target: nn.functional.cross_entropy(output.mT, target),
    ranks=2,
    checkpoint={"none": None, "blocks": "blocks", "attention": attention_only}[options.checkpoint],
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
for step in range(options.steps):
    loss = pipe.step(tokens, target=tokens)
    optimizer.step()
    optimizer.zero_grad()
    if pipe.is_first:
        print(f"step {step + 1}: loss {loss:.4f}")
