"""Models of images, with the structures of torchvision and timm."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.blocks import DEPTH, WIDTH, Block, mlp


class ViT(nn.Module):
    """As in timm: blocks in a Sequential, tokens and positions of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        return self.norm(self.blocks(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x)[:, 0])


class Residual(nn.Module):
    """Two convolutions beside a way around them."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.conv2, self.bn2 = (
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(inside, outside, 1, stride) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        way = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + way)


class ResNet(nn.Module):
    """As in torchvision: four groups of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16))
        self.layer3 = nn.Sequential(Residual(16, 16, 2), Residual(16, 16))
        self.layer4 = nn.Sequential(Residual(16, 16, 2), Residual(16, 16))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Classifier(nn.Module):
    """As in torchvision: features, a pool, and a classifier, each a Sequential."""

    def __init__(self, features: nn.Sequential, width: int) -> None:
        super().__init__()
        self.features, self.avgpool = features, nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(
            nn.Linear(4 * width, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def vgg() -> nn.Module:
    """Convolutions in a row."""
    widths = [3, 8, 8, 16, 16, 16, 16, 16, 16]
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(inplace=True)]
    return Classifier(nn.Sequential(*layers, nn.MaxPool2d(2)), 16)


class Squeezed(nn.Module):
    """An inverted residual with squeeze and excitation, as in EfficientNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(width, 2 * width, 1),
            nn.BatchNorm2d(2 * width),
            nn.SiLU(),
            nn.Conv2d(2 * width, 2 * width, 3, 1, 1, groups=2 * width),
            nn.BatchNorm2d(2 * width),
            nn.SiLU(),
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(2 * width, 4, 1),
            nn.SiLU(),
            nn.Conv2d(4, 2 * width, 1),
            nn.Sigmoid(),
        )
        self.project = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.block(x)
        return x + self.project(wide * self.squeeze(wide))


class Dense(nn.Module):
    """As in DenseNet: each layer sees all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(4 * (layer + 1), 4, 3, 1, 1) for layer in range(DEPTH)
        )
        self.stem, self.head = nn.Conv2d(3, 4, 3, 1, 1), nn.Linear(4 * (DEPTH + 1), 10)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(torch.relu(layer(torch.cat(features, 1))))
        return self.head(torch.cat(features, 1).mean((2, 3)))


class Mixer(nn.Module):
    """Mixes places, then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.places = nn.LayerNorm(WIDTH), mlp(16)
        self.norm2, self.channels = nn.LayerNorm(WIDTH), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class MLPMixer(nn.Module):
    """Of patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.ModuleList(Mixer() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class ConvNeXtBlock(nn.Module):
    """A wide convolution for each channel, and an MLP, scaled by a weight of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 7, 1, 3, groups=width), nn.LayerNorm(width)
        self.mlp, self.gamma = mlp(width), nn.Parameter(torch.ones(width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.conv(x).permute(0, 2, 3, 1))) * self.gamma
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """As in timm: stages with a list of blocks in each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.stages = nn.Sequential(
            *(self._stage(a, b) for a, b in ((8, 8), (8, 16), (16, 16), (16, 16), (16, 16)))
        )
        self.head = nn.Linear(16, 10)

    def _stage(self, inside: int, outside: int) -> nn.Module:
        down = nn.Identity() if inside == outside else nn.Conv2d(inside, outside, 2, 2)
        return nn.Sequential(down, nn.Sequential(ConvNeXtBlock(outside), ConvNeXtBlock(outside)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class SwinBlock(nn.Module):
    """Attention inside of windows, which every other block shifts."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.block, self.shift = Block(), shift

    def forward(self, x: Tensor) -> Tensor:
        rows, height, width, channels = x.shape
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        windows = x.view(rows, height // 2, 2, width // 2, 2, channels).transpose(2, 3)
        mixed = self.block(windows.reshape(-1, 4, channels))
        mixed = mixed.view(rows, height // 2, width // 2, 2, 2, channels).transpose(2, 3)
        return torch.roll(
            mixed.reshape(rows, height, width, channels), (self.shift, self.shift), (1, 2)
        )


class Swin(nn.Module):
    """Windows on patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        self.layers = nn.ModuleList(nn.Sequential(SwinBlock(0), SwinBlock(1)) for _ in range(8))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((1, 2)))


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
