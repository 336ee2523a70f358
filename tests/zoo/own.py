"""Models as people write them, and small stand-ins of the structures of other libraries."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from taktline import add_loss
from tests.zoo.architecture import Architecture

__all__ = ["OWN"]

WORDS, WIDTH, HEADS, DEPTH, LENGTH = 61, 16, 4, 8, 10


class Attention(nn.Module):
    """Of all with all, or with those before; of a row with another if there is one."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.causal = causal

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        key, value = self.key_value(x if other is None else other).chunk(2, -1)
        heads = [
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query(x), key, value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


def mlp(width: int = WIDTH) -> nn.Sequential:
    """Wide and narrow again."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Block(nn.Module):
    """Attention and an MLP behind norms."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(causal)
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


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


class DiTBlock(nn.Module):
    """A block whose norms are shifted and scaled by a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention, self.mlp = Attention(), mlp()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, -1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer: its last layer sees the condition, too."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Conv2d(3, WIDTH, 4, 4)
        self.t_embedder = nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.y_embedder = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(DEPTH))
        self.final = nn.Linear(WIDTH, 48)
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.x_embedder(x).flatten(2).transpose(1, 2)
        c = self.t_embedder(_waves(t)) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(F.silu(c))[:, None].chunk(2, -1)
        return self.final(x * (1 + scale) + shift)


def _waves(t: Tensor) -> Tensor:
    angles = t[:, None].float() * 100.0 ** -torch.linspace(0, 1, 4)
    return torch.cat([angles.cos(), angles.sin()], -1)


class TimeResidual(nn.Module):
    """A residual block that hears the time."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, inside), nn.Conv2d(inside, outside, 3, 1, 1)
        self.time = nn.Linear(WIDTH, outside)
        self.norm2, self.conv2 = nn.GroupNorm(2, outside), nn.Conv2d(outside, outside, 3, 1, 1)
        self.shortcut = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.shortcut(x)


class UNet2D(nn.Module):
    """As in diffusers: blocks down and up, with what goes around the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.time = nn.Conv2d(3, 8, 3, 1, 1), nn.Linear(8, WIDTH)
        self.down_blocks = nn.ModuleList(TimeResidual(a, b) for a, b in ((8, 8), (8, 16), (16, 16)))
        self.mid_block = TimeResidual(16, 16)
        self.up_blocks = nn.ModuleList(TimeResidual(a, b) for a, b in ((32, 16), (32, 8), (16, 8)))
        self.conv_norm_out, self.conv_out = nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 3, 1, 1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        time = self.time(_waves(timestep))
        x, residuals = self.conv_in(sample), []
        for block in self.down_blocks:
            x = block(x, time)
            residuals.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.mid_block(x, time)
        for block in self.up_blocks:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, residuals.pop()], 1), time)
        return self.conv_out(F.silu(self.conv_norm_out(x)))


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


def _double(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, 1, 1),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, 1, 1),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class JointBlock(nn.Module):
    """Two streams that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.image_mlp, self.text_mlp = mlp(), mlp()
        self.modulation = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, hidden: Tensor, context: Tensor, temb: Tensor, angles: Tensor
    ) -> tuple[Tensor, Tensor]:
        scale = self.modulation(temb)[:, None]
        both = torch.cat([self.text(context), self.image(hidden) * (1 + scale)], 1) * angles
        mixed = self.attention(both)
        length = context.shape[1]
        context, hidden = context + mixed[:, :length], hidden + mixed[:, length:]
        return context + self.text_mlp(context), hidden + self.image_mlp(hidden)


class Flux(nn.Module):
    """As in diffusers: double and single blocks, and ids without a batch in front."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder, self.context_embedder = nn.Linear(12, WIDTH), nn.Linear(8, WIDTH)
        self.time = nn.Linear(8, WIDTH)
        self.transformer_blocks = nn.ModuleList(JointBlock() for _ in range(4))
        self.single_transformer_blocks = nn.ModuleList(DiTBlock() for _ in range(4))
        self.norm_out, self.proj_out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 12)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        img_ids: Tensor,
        txt_ids: Tensor,
    ) -> Tensor:
        hidden, context = (
            self.x_embedder(hidden_states),
            self.context_embedder(encoder_hidden_states),
        )
        temb = self.time(_waves(timestep))
        ids = torch.cat([txt_ids, img_ids])
        angles = torch.cos(ids.float() @ torch.ones(3, WIDTH) * 0.1)
        for block in self.transformer_blocks:
            context, hidden = block(hidden, context, temb, angles)
        x = torch.cat([context, hidden], 1)
        for block in self.single_transformer_blocks:
            x = block(x, temb)
        scale, shift = self.norm_out(F.silu(temb))[:, None].chunk(2, -1)
        return self.proj_out(x[:, context.shape[1] :] * (1 + scale) + shift)


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


def tokens(rows: int) -> tuple[Tensor, ...]:
    """Texts."""
    return (torch.randint(WORDS, (rows, LENGTH)),)


def image(rows: int, size: int = 16) -> tuple[Tensor, ...]:
    """Images."""
    return (torch.randn(rows, 3, size, size),)


def features(rows: int) -> tuple[Tensor, ...]:
    """Numbers."""
    return (torch.randn(rows, LENGTH, 8),)


def noisy(rows: int) -> tuple[Tensor, ...]:
    """Images with their times."""
    return (*image(rows), torch.arange(rows))


def classed(rows: int) -> tuple[Tensor, ...]:
    """Images with their times and kinds."""
    return (*noisy(rows), torch.arange(rows) % 10)


def streams(rows: int) -> dict[str, Tensor]:
    """Patches and texts, and ids that all rows share."""
    return {
        "hidden_states": torch.randn(rows, 16, 12),
        "encoder_hidden_states": torch.randn(rows, 6, 8),
        "timestep": torch.arange(rows),
        "img_ids": torch.arange(48).view(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }


def _own(name: str, build: Any, feed: Any) -> Architecture:
    return Architecture(name, "Written by hand", build, feed)


def _row(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *middle, nn.Linear(WIDTH, WORDS))


OWN = [
    _own("Sequential", lambda: _row(*(Block(True) for _ in range(DEPTH))), tokens),
    _own(
        "MLP",
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(9))),
        features,
    ),
    _own("GPT with a tied head", GPT, tokens),
    _own("GPT with checkpoint(block, x)", partial(GPT, True), tokens),
    _own("GPT with checkpoint(…, use_reentrant=False)", partial(GPT, False), tokens),
    _own("GPT whose head is F.linear(x, embed.weight)", FunctionalHead, tokens),
    _own("Llama as in torchtitan", Llama, tokens),
    _own(
        "mixture of experts with add_loss", lambda: _row(*(Experts() for _ in range(DEPTH))), tokens
    ),
    _own("nn.TransformerEncoder", TorchEncoder, tokens),
    _own("nn.Transformer", Seq2Seq, lambda rows: (*tokens(rows), *tokens(rows))),
    _own("LSTMs in a list", LSTMs, tokens),
    _own("GRUs in a list", partial(LSTMs, nn.GRU), tokens),
    _own("nn.LSTM with 8 layers", StackedLSTM, tokens),
    _own("one layer, used 8 times", Universal, tokens),
    _own("ViT as in timm", ViT, image),
    _own("ResNet as in torchvision", ResNet, partial(image, size=32)),
    _own("VGG as in torchvision", vgg, image),
    _own(
        "EfficientNet",
        lambda: Classifier(
            nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), *(Squeezed(8) for _ in range(DEPTH))), 8
        ),
        image,
    ),
    _own("ConvNeXt as in timm", ConvNeXt, image),
    _own("DenseNet", Dense, image),
    _own("MLP-Mixer", MLPMixer, image),
    _own("Swin", Swin, image),
    _own("autoencoder", Autoencoder, image),
    _own("U-Net", UNet, image),
    _own("UNet2D as in diffusers", UNet2D, noisy),
    _own("DiT", DiT, classed),
    _own("FLUX as in diffusers", Flux, streams),
    _own("WaveNet", WaveNet, lambda rows: (torch.randn(rows, 1, 32),)),
    _own("graph network", Graph, lambda rows: (torch.randn(rows, 6, 8), torch.rand(rows, 6, 6))),
    _own("DLRM", Recommender, lambda rows: (torch.randn(rows, 8), torch.randint(20, (rows, 3)))),
    _own("two towers", Towers, lambda rows: (*tokens(rows), *features(rows))),
    _own("every block's output used at the end", Pyramid, features),
    _own("branches on data", Branching, features),
]
