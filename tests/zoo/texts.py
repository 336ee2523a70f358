"""Language models as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from taktline import add_loss
from tests.zoo.blocks import DEPTH, HEADS, LENGTH, WIDTH, WORDS, Block, mlp


class GPT(nn.Module):
    """A language model with a tied head, as in nanoGPT."""

    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.token.weight
        self.checkpoints = checkpoints

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.checkpoints is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpoints)
        return self.head(self.norm(x))


class FunctionalHead(nn.Module):
    """A head that is the embedding's weight, without a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(DEPTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight)


class LlamaBlock(nn.Module):
    """RMS norms, rotated keys, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.gate, self.up = nn.Linear(WIDTH, 32, bias=False), nn.Linear(WIDTH, 32, bias=False)
        self.down = nn.Linear(32, WIDTH, bias=False)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        q, k = _rotated(q, freqs), _rotated(k, freqs)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _rotated(x: Tensor, freqs: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * freqs[:, None]).flatten(-2)


class Llama(nn.Module):
    """As in torchtitan: layers in a dict, complex angles in a buffer."""

    freqs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        angles = torch.outer(torch.arange(LENGTH), 100.0 ** -torch.arange(0, 1, 0.5))
        self.register_buffer(
            "freqs", torch.polar(torch.ones_like(angles), angles), persistent=False
        )
        self.layers = nn.ModuleDict({str(layer): LlamaBlock() for layer in range(DEPTH)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs[: tokens.shape[1]])
        return self.output(self.norm(h))


class Experts(nn.Module):
    """A block that sends each word to one expert, and adds a loss for those that are favoured."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).softmax(-1)
        add_loss(0.01 * chances.mean((0, 1)).square().sum())
        weight, chosen = chances.max(-1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            output = output + expert(x) * (weight * (chosen == number))[..., None]
        return x + output


class LSTMs(nn.Module):
    """Recurrent layers in a list."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH, batch_first=True) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


class StackedLSTM(nn.Module):
    """Recurrent layers inside of one module of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, DEPTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Seq2Seq(nn.Module):
    """nn.Transformer between embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, DEPTH, DEPTH, 32, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.transformer(self.source(source), self.target(target)))


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


class Universal(nn.Module):
    """One layer, used many times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(WORDS, WIDTH), Block()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(DEPTH):
            x = self.block(x)
        return self.head(x)


def row(*middle: nn.Module) -> nn.Sequential:
    """Modules between an embedding and a head."""
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *middle, nn.Linear(WIDTH, WORDS))
