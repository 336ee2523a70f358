"""Models of transformers that see and hear, alone or together with texts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.zoo.architecture import Architecture
from tests.zoo.language import SIZES, configured, words

_IMAGE: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "mlp_dim": 32,
    "embed_dim": 16,
}
_SEEING: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "projection_dim": 16,
    **_IMAGE,
}
_READING: dict[str, Any] = {
    name: SIZES[name]
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "use_cache",
    )
} | {"projection_dim": 16}
_PICTURE = 60
"""The word that stands for a piece of an image."""


def image(rows: int, size: int = 16) -> dict[str, Tensor]:
    """Images."""
    return {"pixel_values": torch.randn(rows, 3, size, size)}


def large(rows: int) -> dict[str, Tensor]:
    """Images with room for all the reductions of a convolutional network."""
    return image(rows, 32)


def sound(rows: int) -> dict[str, Tensor]:
    """Waves."""
    return {"input_values": torch.randn(rows, 400)}


def speech(rows: int) -> dict[str, Tensor]:
    """Spectra, and what was said."""
    said = torch.randint(3, 61, (rows, 8))
    return {"input_features": torch.randn(rows, 16, 32), "decoder_input_ids": said}


def captioned(rows: int) -> dict[str, Tensor]:
    """Images with texts."""
    return words(rows) | image(rows)


def shown(rows: int) -> dict[str, Tensor]:
    """Texts with images in them."""
    texts = torch.randint(3, _PICTURE, (rows, 20))
    texts[:, 1:17] = _PICTURE
    return {"input_ids": texts} | image(rows)


def _model(name: str, kind: str, feed: Any, usual: bool = True, **sizes: Any) -> Architecture:
    build = partial(configured, name, sizes, usual=usual)
    return Architecture(name, kind, build, feed)


def _vision(name: str, feed: Any = image, **sizes: Any) -> Architecture:
    return _model(name, "Vision", feed, **(_IMAGE | sizes))


_STAGED = {"depths": [2, 2, 6, 2], "hidden_sizes": [8, 16, 16, 16], "num_attention_heads": 4}
_CONVOLVED = {
    "conv_dim": [8, 8],
    "conv_kernel": [4, 4],
    "conv_stride": [4, 4],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "num_feat_extract_layers": 2,
}
_audio = partial(_model, kind="Audio", feed=sound)
_towers = partial(_model, kind="Two towers", feed=captioned, usual=False)
_seeing = partial(_model, kind="Vision and language", usual=False)

SENSES = [
    _vision("ViTForImageClassification"),
    _vision("DeiTForImageClassification"),
    _vision("BeitForImageClassification"),
    _vision("Dinov2ForImageClassification"),
    _vision("Dinov2WithRegistersForImageClassification"),
    _vision("IJepaForImageClassification"),
    _vision("YolosForObjectDetection", num_detection_tokens=4, image_size=[16, 16]),
    _vision(
        "SwinForImageClassification",
        large,
        image_size=32,
        patch_size=2,
        window_size=2,
        depths=[2, 2, 6],
        num_heads=[2, 4, 4],
        embed_dim=8,
        usual=False,
    ),
    _vision("ConvNextForImageClassification", large, num_hidden_layers=4, **_STAGED),
    _vision("ResNetForImageClassification", large, embedding_size=8, **_STAGED),
    _vision(
        "SegformerForImageClassification",
        large,
        hidden_sizes=[8, 16, 16, 16],
        num_attention_heads=[1, 2, 4, 4],
        num_hidden_layers=4,
        depths=[2, 2, 6, 2],
    ),
    _vision("PoolFormerForImageClassification", large, hidden_sizes=[8, 16, 16, 16]),
    _audio("Wav2Vec2ForCTC", **_CONVOLVED),
    _audio("HubertForCTC", **_CONVOLVED),
    _audio("WavLMForCTC", **_CONVOLVED),
    _audio(
        "ASTForAudioClassification",
        feed=lambda rows: {"input_values": torch.randn(rows, 24, 16)},
        patch_size=4,
        max_length=24,
        num_mel_bins=16,
        frequency_stride=4,
        time_stride=4,
    ),
    _audio(
        "WhisperForConditionalGeneration",
        feed=speech,
        num_mel_bins=16,
        max_source_positions=16,
        max_target_positions=16,
        apply_spec_augment=False,
    ),
    _audio(
        "Speech2TextForConditionalGeneration",
        feed=lambda rows: {
            "input_features": torch.randn(rows, 32, 16),
            "decoder_input_ids": torch.randint(3, 61, (rows, 8)),
        },
        input_feat_per_channel=16,
        conv_channels=16,
        num_conv_layers=2,
        max_source_positions=32,
        max_target_positions=16,
    ),
    _towers("CLIPModel", text_config=_READING, vision_config=_SEEING, projection_dim=16),
    _towers("SiglipModel", text_config=_READING, vision_config=_SEEING),
    _towers(
        "BlipForImageTextRetrieval",
        text_config=_READING,
        vision_config=_SEEING,
        projection_dim=16,
        image_text_hidden_size=16,
    ),
    _seeing(
        "LlavaForConditionalGeneration",
        feed=shown,
        image_token_id=_PICTURE,
        image_token_index=_PICTURE,
        text_config=_READING | {"model_type": "llama"},
        vision_config=_SEEING | {"model_type": "clip_vision_model"},
    ),
    _seeing(
        "PaliGemmaForConditionalGeneration",
        feed=shown,
        image_token_index=_PICTURE,
        projection_dim=16,
        text_config=_READING | {"model_type": "gemma"},
        vision_config=_SEEING | {"model_type": "siglip_vision_model", "vision_use_head": False},
    ),
    _seeing("GitForCausalLM", feed=captioned, vision_config=_SEEING, **_READING),
    _seeing(
        "Blip2ForConditionalGeneration",
        feed=shown,
        vision_config=_SEEING,
        num_query_tokens=16,
        image_token_index=_PICTURE,
        qformer_config={**_READING, "encoder_hidden_size": 16, "num_hidden_layers": 2},
        text_config={**_READING, "model_type": "opt", "ffn_dim": 32, "word_embed_proj_dim": 16},
    ),
]
