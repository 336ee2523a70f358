"""Models that are hard to cut: skips, branches, shared weights, regions without gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from taktline import SplitPoint
from tests.models import loss_fn, make_batch, make_layers

BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(inner + x)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(4) for _ in range(3))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class PatchEmbed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class ViT(nn.Module):
    """As in timm: tokens and positions are parameters of the model itself."""

    def __init__(self, width: int = 8, depth: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, width))
        self.patch_embed = PatchEmbed(width)
        self.pos_drop = nn.Dropout(0.0)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.pos_drop(x + self.pos_embed)
        return self.norm(self.blocks(x))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(x[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)])
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = F.silu(layer(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.dropout(F.silu(self.middle(x)))
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = layer(torch.cat((x, skips.pop()), dim=1))
        return x


class Rotary(nn.Module):
    """As in transformers: angles, under no_grad."""

    speeds: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("speeds", torch.tensor([1.0, 0.5, 0.25, 0.125]), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return (places.unsqueeze(-1) * self.speeds).cos()


class Rotated(nn.Module):
    """The rotary angles are used by all layers; embedding and head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.rotary = Rotary()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        angles = self.rotary(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x * angles))
        return self.head(x)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    cuts: Mapping[int, dict[str, Any]]
    """By the number of stages."""


def images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(count, 3, 8, 8, generator=generator),
        torch.randn(count, 3, 8, 8, generator=generator),
    )


def labelled(count: int) -> tuple[Tensor, Tensor]:
    return images(count)[0], torch.arange(count) % 5


def words(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(11, (count, 7), generator=generator)
    return text[:, :-1].clone(), text[:, 1:].clone()


def language(name: str) -> Case:
    return Case(
        lambda: nn.Sequential(*make_layers(name, 4)),
        lambda count: make_batch(name, count),
        loss_fn(name),
        {2: {"2": BEGINNING}, 4: {"1": BEGINNING, "1.down": END, "3.0": END}},
    )


CASES = {
    "gpt": language("gpt"),
    "llama": language("llama"),
    "resnet": Case(
        ResNet,
        labelled,
        F.cross_entropy,
        {
            2: {"blocks.1": BEGINNING},
            4: {"stem": END, "blocks.0": END, "blocks.1.conv1": END},
        },
    ),
    "unet": Case(
        UNet,
        images,
        F.mse_loss,
        {2: {"middle": BEGINNING}, 4: {"down.1": BEGINNING, "middle": BEGINNING, "up.0": END}},
    ),
    "rotated": Case(
        Rotated,
        words,
        loss_fn("gpt"),
        {
            2: {"layers.1": BEGINNING},
            4: {"layers.0": BEGINNING, "layers.1": BEGINNING, "layers.2": END},
        },
    ),
}


def make(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return CASES[name].make()
