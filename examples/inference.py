"""Inference with a model that one device cannot hold: several prompts go on at the same time.

python examples/inference.py                       # two ranks in this process
torchrun --nproc-per-node 2 examples/inference.py  # a process each
"""

import argparse

import torch
from torch import nn

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--tokens", type=int, default=8)
options = parser.parse_args()


class Counter(nn.Module):
    """Says what comes next: here the token that follows in the alphabet."""

    def __init__(self, words: int = 26, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        with torch.no_grad():  # as if it were trained: the head knows the next token
            for weight in self.layers.parameters():
                weight.copy_(torch.eye(width) if weight.ndim == 2 else torch.zeros(width))
            self.head.weight.copy_(self.embed.weight.roll(1, 0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, -1])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(0)
tokens = torch.arange(8).reshape(8, 1)  # eight prompts: a, b, c, …
pipe = tl.Pipeline(
    Counter(),
    example=(tokens[:2],),
    schedule="forward_only",
    stages_per_rank=1,
    microbatches=4,  # two prompts each; while one stage runs some, the next runs others
    ranks=2,
)
for _ in range(options.tokens):
    scores = pipe.eval(tokens)  # on every rank, so that all go on with the same tokens
    tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], dim=1)

if pipe.is_first:
    for row in tokens.tolist():
        print("".join(chr(ord("a") + token) for token in row))
