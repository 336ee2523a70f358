"""Small models of transformers, from their configuration, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

WORDS, LENGTH, LAYERS = 61, 10, 4

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # As splits run them: what comes out of a cache has other strides, and may be rounded otherwise.
    "use_cache": False,
}
_LLAMA: dict[str, Any] = {**_SIZES, "intermediate_size": 64, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Language:
    model: str
    """The name of its class."""
    config: str
    sizes: dict[str, Any]
    layers: str
    """The name of its layers."""
    tied: tuple[str, str] | None = None
    """The parameters that are one."""

    def make(self, attention: str = "eager") -> nn.Module:
        """The model, the same each time."""
        config = getattr(transformers, self.config)(**self.sizes, attn_implementation=attention)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return getattr(transformers, self.model)(config)

    def cuts(self, stages: int) -> list[str]:
        """Where to cut."""
        first = LAYERS // stages
        return [f"{self.layers}.{layer}" for layer in range(first, LAYERS, first)]


LANGUAGES = {
    "gpt2": Language(
        "GPT2LMHeadModel",
        "GPT2Config",
        {**_SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "transformer.h",
        ("transformer.wte.weight", "lm_head.weight"),
    ),
    "llama": Language("LlamaForCausalLM", "LlamaConfig", _LLAMA, "model.layers"),
    "qwen2": Language(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**_LLAMA, "tie_word_embeddings": True},
        "model.layers",
        ("model.embed_tokens.weight", "lm_head.weight"),
    ),
    "mistral": Language(
        "MistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": 4}, "model.layers"
    ),
    "gemma2": Language(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_LLAMA, "head_dim": 8, "sliding_window": 4},
        "model.layers",
        ("model.embed_tokens.weight", "lm_head.weight"),
    ),
    "bert": Language(
        "BertForMaskedLM",
        "BertConfig",
        {
            **_SIZES,
            "intermediate_size": 64,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        "bert.encoder.layer",
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ),
    "opt": Language(
        "OPTForCausalLM",
        "OPTConfig",
        {**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 16, "dropout": 0.0},
        "model.decoder.layers",
        ("model.decoder.embed_tokens.weight", "lm_head.weight"),
    ),
    "phi3": Language(
        "Phi3ForCausalLM", "Phi3Config", {**_LLAMA, "sliding_window": 5}, "model.layers"
    ),
}


def texts(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words, a mask of those that are none, and what comes next."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(3, WORDS, (count, LENGTH + 1), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (count, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return words[:, :-1].clone(), mask, words[:, 1:].clone()


def loss(output: Any, target: Tensor) -> Tensor:
    """The mean over all words."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


Loss = Callable[[Any, Tensor], Tensor]
