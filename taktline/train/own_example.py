"""An example for a model of transformers, which knows its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from taktline.split.arguments import without_padding

_LENGTH = 128
"""Of a text: long enough for its layers to compute, and not only to begin."""


def own_example(model: nn.Module) -> Any:
    """Arguments by which a model can be cut; None if it does not say what it takes."""
    dummies, config = getattr(model, "dummy_inputs", None), getattr(model, "config", None)
    if not isinstance(dummies, dict):
        return None
    if getattr(model, "main_input_name", "") == "pixel_values":
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else size or (0, 0)
        return (), {"pixel_values": torch.zeros(1, channels, height, width)}
    most = min(_LENGTH, getattr(config, "max_position_embeddings", None) or _LENGTH)
    texts = {
        name: _lengthened(without_padding(model, each), most) for name, each in dummies.items()
    }
    return (), texts


def _lengthened(dummy: Any, length: int) -> Any:
    """Texts, repeated up to a length; other values as they are."""
    if not isinstance(dummy, torch.Tensor) or dummy.ndim != 2 or dummy.is_floating_point():
        return dummy
    return dummy.repeat(1, -(-length // dummy.shape[1]))[:1, :length]
