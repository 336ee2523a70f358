"""Models of timm and torchvision, with small numbers; where these are installed."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from tests.zoo.architecture import Architecture
from tests.zoo.blocks import image


def configured(library: str, name: str, sizes: dict[str, Any]) -> nn.Module:
    """The model of a class, or of a function that makes one."""
    return getattr(import_module(f"{library}.models"), name)(num_classes=10, **sizes)


def _model(library: str, name: str, size: int = 32, **sizes: Any) -> Architecture:
    build = partial(configured, library, name, sizes)
    feed = partial(image, size=size)
    return Architecture(f"{name} of {library}", "Images", build, feed, needs=library)


_timm, _torchvision = partial(_model, "timm"), partial(_model, "torchvision")

IMAGES = [
    _timm("VisionTransformer", 16, img_size=16, patch_size=4, embed_dim=16, depth=8, num_heads=4),
    _timm("MlpMixer", 16, img_size=16, patch_size=4, embed_dim=16),
    _timm(
        "SwinTransformer",
        img_size=32,
        patch_size=2,
        window_size=2,
        embed_dim=8,
        depths=(2, 2, 6),
        num_heads=(2, 4, 4),
        drop_path_rate=0.0,
    ),
    _timm("ConvNeXt", depths=(2, 2, 6, 2), dims=(8, 16, 16, 16)),
    _timm("resnet18", channels=(8, 16, 16, 16), stem_width=8),
    _timm("densenet121", growth_rate=4, block_config=(2, 2, 6, 2)),
    _timm("efficientnet_b0", 64),
    _torchvision("resnet18", 64),
    _torchvision(
        "VisionTransformer",
        16,
        image_size=16,
        patch_size=4,
        num_layers=8,
        num_heads=4,
        hidden_dim=16,
        mlp_dim=32,
    ),
]
