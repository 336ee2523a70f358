"""Models that are no row of layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.blocks import DEPTH, WIDTH, WORDS, Block


class Towers(nn.Module):
    """Two rows of layers beside each other, compared at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.left_in = nn.Embedding(WORDS, WIDTH), nn.Linear(8, WIDTH)
        self.left = nn.ModuleList(Block() for _ in range(4))
        self.right = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        left, right = self.left_in(features), self.embed(tokens)
        for block in self.left:
            left = block(left)
        for block in self.right:
            right = block(right)
        return F.normalize(left.mean(1), dim=-1) @ F.normalize(right.mean(1), dim=-1).T


class Pyramid(nn.Module):
    """The outputs of all blocks are used at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x, found = self.stem(x), []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return torch.cat([head(each) for head, each in zip(self.heads, found, strict=True)], -1)


class Recommender(nn.Module):
    """As DLRM: tables and an MLP, and what they have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, WIDTH) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, WIDTH), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(WIDTH + 16, 32),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 16),
            nn.ReLU(),
            nn.Linear(16, 16),
            nn.ReLU(),
            nn.Linear(16, 1),
        )

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        found = torch.stack([x, *(table(sparse[:, n]) for n, table in enumerate(self.tables))], 1)
        return self.top(torch.cat([x, (found @ found.transpose(1, 2)).flatten(1)], 1))


class WaveNet(nn.Module):
    """Dilated convolutions whose skips are added up at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Conv1d(1, 8, 1), nn.Conv1d(8, 4, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(8, 16, 2, padding=2 ** (n % 4), dilation=2 ** (n % 4)) for n in range(DEPTH)
        )
        self.skips = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.start(x), torch.zeros(())
        for gate, skip in zip(self.gates, self.skips, strict=True):
            filtered, opened = gate(x)[..., : x.shape[-1]].chunk(2, 1)
            y = torch.tanh(filtered) * torch.sigmoid(opened)
            total = total + skip(y)
            x = x + y
        return self.end(F.relu(total))


class Graph(nn.Module):
    """Messages along the edges of a graph, given as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.relu(layer(edges @ x))
        return self.head(x)


class Branching(nn.Module):
    """What it does depends on what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 0:
                x = torch.tanh(x)
        return x


class Autoencoder(nn.Module):
    """An encoder and a decoder of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, 1, 1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, 1, 1),
            nn.ReLU(),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(16, 16, 3, 1, 1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, 1, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 2, 2),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 2, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def _double(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, 1, 1),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, 1, 1),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """For segmentation, without time."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_double(3, 8), _double(8, 16), _double(16, 16)])
        self.middle = _double(16, 16)
        self.up = nn.ModuleList([_double(32, 16), _double(32, 8), _double(16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        return self.head(x)
