"""Diffusion models, with the structures of diffusers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.blocks import DEPTH, WIDTH, Attention, mlp, waves


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
        c = self.t_embedder(waves(t)) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(F.silu(c))[:, None].chunk(2, -1)
        return self.final(x * (1 + scale) + shift)


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
        time = self.time(waves(timestep))
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
        temb = self.time(waves(timestep))
        ids = torch.cat([txt_ids, img_ids])
        angles = torch.cos(ids.float() @ torch.ones(3, WIDTH) * 0.1)
        for block in self.transformer_blocks:
            context, hidden = block(hidden, context, temb, angles)
        x = torch.cat([context, hidden], 1)
        for block in self.single_transformer_blocks:
            x = block(x, temb)
        scale, shift = self.norm_out(F.silu(temb))[:, None].chunk(2, -1)
        return self.proj_out(x[:, context.shape[1] :] * (1 + scale) + shift)
