"""A small language model with all that makes pipelines hard, and how it is trained without one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import taktline as tl

WORDS, WIDTH, LENGTH, BATCH, PARTS = 13, 8, 5, 8, 4
CUTS = {2: ["blocks.2"], 4: ["blocks.1", "blocks.2", "blocks.3"]}


class Block(nn.Module):
    """A residual block; one of them adds a loss."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.adds = adds

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.wide(self.norm(x)))
        if self.adds:
            tl.add_loss(0.1 * hidden.square().mean())
        return x + self.narrow(hidden)


class LM(nn.Module):
    """Embedding, blocks and a head, which may be the embedding again."""

    def __init__(self, *, tied: bool = True, adds: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(adds and number == 1) for number in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, shift: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        if shift is not None:
            x = x + shift[..., None]
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens, where -100 counts for nothing."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batches(steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    """The same ones each time."""
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randint(WORDS, (BATCH, LENGTH), generator=generator),
            torch.randint(WORDS, (BATCH, LENGTH), generator=generator),
        )
        for _ in range(steps)
    ]


TOKENS, TARGET = batches(1)[0]


def pipeline(model: Any = None, **options: Any) -> tl.Pipeline:
    """A pipeline with 1F1B on two ranks, or on those of a mesh; the LM is cut in the middle."""
    model = LM() if model is None else model
    usual: dict[str, Any] = {"schedule": "1f1b", "microbatches": PARTS, "loss_fn": loss_fn}
    usual["ranks"] = None if "mesh" in options else 2
    if isinstance(model, LM):
        usual |= {"cuts": CUTS[2], "example": (TOKENS[:2],)}
    return tl.Pipeline(model, **(usual | options))


@dataclass
class Record:
    """What a training run has shown."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)

    def require_close(self, other: Record, **limits: Any) -> None:
        """Fail unless the other one has shown the same."""
        torch.testing.assert_close(Tensor(self.losses), Tensor(other.losses), **limits)
        torch.testing.assert_close(Tensor(self.norms), Tensor(other.norms), **limits)
        assert sorted(self.state) == sorted(other.state)
        torch.testing.assert_close(self.state, other.state, **limits)


def plain(
    model: nn.Module,
    *,
    max_norm: float = 0.5,
    norm_type: float = 2.0,
    loss: Callable[..., Tensor] = loss_fn,
    cast: bool = False,
    steps: int = 3,
) -> Record:
    """Train without a pipeline, in micro-batches."""
    model, record = copy.deepcopy(model), Record()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens, target in batches(steps):
        total = 0.0
        for part, answer in zip(tokens.chunk(PARTS), target.chunk(PARTS), strict=True):
            with (
                torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast),
                tl.collect_losses() as added,
            ):
                found = loss(model(part), answer)
            (sum(added, start=found) / PARTS).backward()
            total += found.item() / PARTS
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        optimizer.step()
        optimizer.zero_grad()
        record.losses.append(total)
        record.norms.append(norm.item())
    record.state = {name: value.clone() for name, value in model.state_dict().items()}
    return record


def train(
    pipe: tl.Pipeline,
    *,
    max_norm: float = 0.5,
    norm_type: float = 2.0,
    cast: bool = False,
    steps: int = 3,
    **options: Any,
) -> Record:
    """The same with one; the state is where it is gathered."""
    record = Record()
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for tokens, target in batches(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            loss = pipe.step(tokens, target=target, **options)
        norm = pipe.clip_grad_norm_(max_norm, norm_type)
        optimizer.step()
        optimizer.zero_grad()
        record.losses.append(loss.item())
        record.norms.append(norm.item())
    record.state = pipe.state_dict(gathered=True)
    return record
