"""Small models of the kinds that are trained in pipelines, as lists of layers to cut into stages.

Running the layers one after the other is the model, and so is running the stages of any cut::

    layers = make_layers("gpt", 4)
    model = nn.Sequential(*layers)
    stages = cut(layers, 2)  # the same modules: train the one or the other
    tokens, target = make_batch("gpt", 8)
    loss_fn("gpt")(stages[1](stages[0](tokens)), target)

``.to(torch.float64)`` works on all of them. The seeds leave torch's own random numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAMES = ("mlp", "gpt", "llama")

WIDTH = 16  # of the mlp
DIM = 32  # of the others, as all below
HEADS = 4
KEY_HEADS = 2  # Llama's: two heads of queries share one of keys and values
HIDDEN = 64
VOCABULARY = 61
LENGTH = 12


def make_layers(name: str, layers: int, seed: int = 0, dropout: float = 0.0) -> list[nn.Module]:
    """The layers of a model; the first one also embeds, the last one also has norm and head.

    Only the gpt knows dropout.
    """
    with _seeded(seed):
        if name == "mlp":
            return [MLPBlock() for _ in range(layers)]
        if name == "gpt":
            blocks = [GPTBlock(dropout) for _ in range(layers)]
            return _with_ends(GPTEmbedding(dropout), blocks, GPTHead())
        blocks = [LlamaBlock() for _ in range(layers)]
        return _with_ends(nn.Embedding(VOCABULARY, DIM), blocks, LlamaHead())


def cut(layers: Sequence[nn.Module], stages: int) -> list[nn.Sequential]:
    """The layers in stages of as equal a length as possible; the longer ones come first."""
    length, longer = divmod(len(layers), stages)
    starts = [stage * length + min(stage, longer) for stage in range(stages + 1)]
    return [nn.Sequential(*layers[starts[n] : starts[n + 1]]) for n in range(stages)]


def make_batch(
    name: str, batch: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """An input and its target. Tokens are whole numbers: the dtype only matters for the mlp."""
    generator = torch.Generator().manual_seed(seed)
    if name == "mlp":
        both = torch.randn(2, batch, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        return both[0].clone(), both[1].clone()
    # The target is the next token, so a text is one longer than the input.
    text = torch.randint(VOCABULARY, (batch, LENGTH + 1), generator=generator)
    return text[:, :-1].clone(), text[:, 1:].clone()


def loss_fn(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The model's loss: the mean over all values, or over all tokens."""
    return squared_error if name == "mlp" else cross_entropy


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error."""
    return F.mse_loss(output, target)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy of all tokens."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class MLPBlock(nn.Module):
    """x + W₂ gelu(W₁ norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPTEmbedding(nn.Module):
    """What a token is, plus where it stands."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, DIM)
        self.position = nn.Embedding(LENGTH, DIM)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))


class GPTBlock(nn.Module):
    """Causal attention and an MLP, each behind its norm and beside a residual."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(DIM)
        self.query_key_value = nn.Linear(DIM, 3 * DIM)
        self.projection = nn.Linear(DIM, DIM)
        self.mlp_norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self._attention(self.attention_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))

    def _attention(self, x: Tensor) -> Tensor:
        query, key, value = (_heads(part) for part in self.query_key_value(x).chunk(3, dim=-1))
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.projection(_joined(mixed))


class GPTHead(nn.Module):
    """From the last block to one number for each token of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    """Attention with rotated, shared keys, then SwiGLU; RMS norms and no biases."""

    cosine: Tensor
    sine: Tensor

    def __init__(self) -> None:
        super().__init__()
        width = DIM // HEADS
        self.attention_norm = nn.RMSNorm(DIM)
        self.query = nn.Linear(DIM, HEADS * width, bias=False)
        self.key = nn.Linear(DIM, KEY_HEADS * width, bias=False)
        self.value = nn.Linear(DIM, KEY_HEADS * width, bias=False)
        self.projection = nn.Linear(HEADS * width, DIM, bias=False)
        self.mlp_norm = nn.RMSNorm(DIM)
        self.gate = nn.Linear(DIM, HIDDEN, bias=False)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        angles = _angles(width)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.attention_norm(x))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _attention(self, x: Tensor) -> Tensor:
        query = self._rotated(_heads(self.query(x)))
        key = self._rotated(_heads(self.key(x), KEY_HEADS))
        value = _heads(self.value(x), KEY_HEADS)
        mixed = F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(HEADS // KEY_HEADS, dim=1),
            value.repeat_interleave(HEADS // KEY_HEADS, dim=1),
            is_causal=True,
        )
        return self.projection(_joined(mixed))

    def _rotated(self, x: Tensor) -> Tensor:
        """Each pair of numbers turned by the angle of its position."""
        cosine, sine = self.cosine[: x.shape[2]], self.sine[: x.shape[2]]
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)


class LlamaHead(nn.Module):
    """From the last block to one number for each token of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def _with_ends(
    embedding: nn.Module, blocks: Sequence[nn.Module], head: nn.Module
) -> list[nn.Module]:
    """The blocks, the first one joined with the embedding and the last one with the head."""
    layers = list(blocks)
    layers[0] = nn.Sequential(embedding, layers[0])
    layers[-1] = nn.Sequential(layers[-1], head)
    return layers


def _heads(x: Tensor, count: int = HEADS) -> Tensor:
    """[batch, length, width] as [batch, head, length, width of a head]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    """The way back from :func:`_heads`."""
    return x.transpose(1, 2).flatten(2)


def _angles(width: int) -> Tensor:
    """By how much each position turns each pair of numbers of a head."""
    speeds = 10000.0 ** (-torch.arange(0, width, 2) / width)
    return torch.outer(torch.arange(LENGTH), speeds)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers by the seed on the CPU; nothing else notices."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would seed the accelerators too, and that would last.
        torch.default_generator.manual_seed(seed)
        yield
