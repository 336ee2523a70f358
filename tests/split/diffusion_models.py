"""Small models with the structure of those in diffusers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.label = nn.Embedding(10, WIDTH)

    def forward(self, time: Tensor, label: Tensor) -> Tensor:
        return self.time(time[:, None]) + self.label(label)


class AdaptiveNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = Embedding()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        scale, shift = self.linear(F.silu(self.emb(time, label)))[:, None].chunk(2, -1)
        return self.norm(x) * (1 + scale) + shift


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = AdaptiveNorm()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        return x + self.linear(self.norm1(x, time, label))


class DiT(nn.Module):
    """Uses what is inside of its first block again, behind the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.out1, self.out2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 48)

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, time=time, label=label)
        condition = self.blocks[0].norm1.emb(time, label)  # pyright: ignore
        shift, scale = self.out1(F.silu(condition))[:, None].chunk(2, -1)
        return self.out2(self.norm(x) * (1 + scale) + shift)


class Resnet(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first, self.time = nn.Conv2d(before, after, 3, padding=1), nn.Linear(WIDTH, after)
        self.norm, self.second = nn.GroupNorm(2, after), nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.norm(self.first(x) + self.time(time)[:, :, None, None])
        return self.shortcut(x) + self.second(F.silu(y))


class Down(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([Resnet(before, after), Resnet(after, after)])
        self.smaller = nn.Conv2d(after, after, 3, 2, 1)

    def forward(self, x: Tensor, time: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        found: tuple[Tensor, ...] = ()
        for resnet in self.resnets:
            x = resnet(x, time)
            found += (x,)
        return self.smaller(x), found


class Up(nn.Module):
    def __init__(self, before: list[int], after: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(Resnet(channels, after) for channels in before)

    def forward(self, x: Tensor, skips: tuple[Tensor, ...], time: Tensor, size: Tensor) -> Tensor:
        x = F.interpolate(x, size=size)  # pyright: ignore[reportArgumentType]
        for resnet, skip in zip(self.resnets, reversed(skips), strict=True):
            x = resnet(torch.cat([x, skip], 1), time)
        return x


class UNet2D(nn.Module):
    """Blocks give and take several skips, as many as they have layers."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, WIDTH)
        self.conv_in = nn.Conv2d(3, 4, 3, padding=1)
        self.downs = nn.ModuleList([Down(4, 4), Down(4, 8)])
        self.middle = Resnet(8, 8)
        self.ups = nn.ModuleList([Up([16, 16], 8), Up([12, 8], 4)])
        self.conv_out = nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        embedding = self.time(time[:, None])
        x = self.conv_in(x)
        skips: list[Tensor] = []
        for down in self.downs:
            x, found = down(x, time=embedding)
            skips += found
        x = self.middle(x, embedding)
        for up in self.ups:
            count = len(up.resnets)  # pyright: ignore[reportArgumentType]
            own, skips = tuple(skips[-count:]), skips[:-count]
            x = up(x, own, embedding, size=own[-1].shape[2:])
        return self.conv_out(F.silu(x))
