"""Models of diffusers, from configurations with small numbers."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.architecture import Architecture

TEXT, POOLED = 8, 12
"""How wide the texts are that images are made from: of each word, and of all of them."""


def configured(name: str, sizes: dict[str, Any]) -> nn.Module:
    """The model of a class."""
    # Here, because diffusers takes seconds to import.
    return getattr(import_module("diffusers"), name)(**sizes)


def _times(rows: int) -> Tensor:
    return torch.arange(rows) * 7 + 1


def _image(rows: int) -> dict[str, Tensor]:
    return {"sample": torch.randn(rows, 4, 16, 16)}


def _noisy(rows: int) -> dict[str, Tensor]:
    return _image(rows) | {"timestep": _times(rows)}


def _conditioned(rows: int) -> dict[str, Tensor]:
    return _noisy(rows) | {"encoder_hidden_states": torch.randn(rows, 6, TEXT)}


def _classed(rows: int) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(rows, 4, 8, 8),
        "timestep": _times(rows),
        "class_labels": torch.arange(rows) % 10,
    }


def _told(rows: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(rows, 4, 8, 8),
        "encoder_hidden_states": torch.randn(rows, 6, TEXT),
        "timestep": _times(rows),
    }


def _pooled(rows: int) -> dict[str, Any]:
    return _told(rows) | {"pooled_projections": torch.randn(rows, POOLED)}


def _packed(rows: int) -> dict[str, Any]:
    """Patches in a row, with ids that all rows of a batch share."""
    return _pooled(rows) | {
        "hidden_states": torch.randn(rows, 16, 4),
        "timestep": _times(rows) / 1000,
        "img_ids": torch.arange(48).view(16, 3) % 5,
        "txt_ids": torch.zeros(6, 3),
    }


def _masked(rows: int) -> dict[str, Any]:
    return _told(rows) | {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


def _video(rows: int) -> dict[str, Any]:
    return _told(rows) | {"hidden_states": torch.randn(rows, 4, 3, 8, 8)}


_UNET = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (8, 16),
    "layers_per_block": 2,
    "norm_num_groups": 4,
}
_DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 8,
    "in_channels": 4,
    "out_channels": 4,
}


def _model(name: str, feed: Any, **sizes: Any) -> Architecture:
    return Architecture(name, "Diffusion", partial(configured, name, sizes), feed)


DIFFUSION = [
    _model(
        "UNet2DModel",
        _noisy,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        **_UNET,
    ),
    _model(
        "UNet2DConditionModel",
        _conditioned,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=4,
        cross_attention_dim=TEXT,
        **_UNET,
    ),
    _model(
        "AutoencoderKL",
        _image,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        **_UNET,
    ),
    _model("DiTTransformer2DModel", _classed, sample_size=8, num_embeds_ada_norm=100, **_DIT),
    _model(
        "PixArtTransformer2DModel",
        _masked,
        sample_size=8,
        cross_attention_dim=16,
        caption_channels=TEXT,
        use_additional_conditions=False,
        **_DIT,
    ),
    _model(
        "SD3Transformer2DModel",
        _pooled,
        sample_size=8,
        joint_attention_dim=TEXT,
        caption_projection_dim=16,
        pooled_projection_dim=POOLED,
        pos_embed_max_size=8,
        **_DIT,
    ),
    _model(
        "FluxTransformer2DModel",
        _packed,
        joint_attention_dim=TEXT,
        pooled_projection_dim=POOLED,
        axes_dims_rope=(2, 2, 4),
        num_single_layers=4,
        **_DIT | {"num_layers": 4},
    ),
    _model("WanTransformer3DModel", _video, text_dim=TEXT, freq_dim=8, ffn_dim=32, **_DIT),
]
