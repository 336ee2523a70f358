"""Language models of transformers, from configurations with small numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.zoo.architecture import Architecture

WORDS, LENGTH = 61, 10

SIZES: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size"], 16),
    **dict.fromkeys(
        ["num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"], 8
    ),
    **dict.fromkeys(["decoder_layers", "num_decoder_layers"], 8),
    **dict.fromkeys(["num_attention_heads", "n_head", "num_heads", "n_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads", "head_dim", "d_kv"], 4),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim"], 32),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"], 32),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx"], 32),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_experts_per_tok"], 2),
    "vocab_size": WORDS,
    "rotary_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
"""What configurations call their sizes, in one: each takes what it knows."""


def configured(
    name: str, sizes: dict[str, Any], *, usual: bool = True, without: Sequence[str] = ()
) -> nn.Module:
    """The model of a class, without dropout."""
    kind = getattr(transformers, name)
    usual_sizes = {key: size for key, size in SIZES.items() if usual and key not in without}
    config = kind.config_class(**(usual_sizes | sizes))
    _without_dropout(config)
    return kind(config)


def _without_dropout(config: Any) -> None:
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            _without_dropout(value)
        elif isinstance(value, float) and ("drop" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)


def words(rows: int) -> dict[str, Tensor]:
    """Texts of one length."""
    return {"input_ids": torch.randint(3, WORDS, (rows, LENGTH))}


def padded(rows: int) -> dict[str, Tensor]:
    """Texts of several lengths, with a mask."""
    lengths = 4 + torch.arange(rows) % (LENGTH - 3)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return words(rows) | {"attention_mask": mask}


def pairs(rows: int) -> dict[str, Tensor]:
    """Texts with masks, and what is to come out of them."""
    return padded(rows) | {"decoder_input_ids": torch.randint(3, WORDS, (rows, LENGTH - 2))}


def _model(
    name: str, kind: str, feed: Any = words, without: Sequence[str] = (), **sizes: Any
) -> Architecture:
    return Architecture(name, kind, partial(configured, name, sizes, without=without), feed)


_decoder = partial(_model, kind="Decoders", feed=padded)
_experts = partial(_model, kind="Mixtures of experts")
_recurrent = partial(_model, kind="State spaces and recurrence")
_encoder = partial(_model, kind="Encoders", feed=padded)
_both = partial(_model, kind="Encoders with decoders", feed=pairs)

LANGUAGE = [
    _decoder("GPT2LMHeadModel"),
    _decoder("GPTNeoForCausalLM", attention_types=[[["global", "local"], 4]], window_size=4),
    _decoder("GPTNeoXForCausalLM"),
    _decoder("GPTJForCausalLM"),
    _decoder("GPTBigCodeForCausalLM"),
    _decoder("CodeGenForCausalLM"),
    _decoder("OpenAIGPTLMHeadModel"),
    _decoder("LlamaForCausalLM"),
    _decoder("MistralForCausalLM", sliding_window=4),
    _decoder("Qwen2ForCausalLM", tie_word_embeddings=True),
    _decoder("Qwen3ForCausalLM"),
    _decoder("GemmaForCausalLM"),
    _decoder("Gemma2ForCausalLM", sliding_window=4),
    _decoder("Gemma3ForCausalLM", sliding_window=4),
    _decoder("PhiForCausalLM"),
    _decoder("Phi3ForCausalLM"),
    _decoder("OPTForCausalLM"),
    _decoder("BloomForCausalLM"),
    _decoder("MptForCausalLM"),
    _decoder("StableLmForCausalLM"),
    _decoder("CohereForCausalLM"),
    _decoder("Olmo2ForCausalLM"),
    _decoder("GraniteForCausalLM"),
    _decoder("NemotronForCausalLM"),
    _decoder("Starcoder2ForCausalLM"),
    _decoder("SmolLM3ForCausalLM"),
    _decoder("Glm4ForCausalLM"),
    _decoder("Exaone4ForCausalLM"),
    _decoder("BioGptForCausalLM"),
    _decoder("XGLMForCausalLM"),
    _decoder("ModernBertDecoderForCausalLM"),
    _experts("MixtralForCausalLM"),
    _experts("Qwen2MoeForCausalLM", shared_expert_intermediate_size=16),
    _experts("Qwen3MoeForCausalLM"),
    _experts("OlmoeForCausalLM"),
    _experts(
        "DeepseekV3ForCausalLM",
        num_key_value_heads=4,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    _experts("GptOssForCausalLM"),
    _experts("PhimoeForCausalLM", router_jitter_noise=0.0, input_jitter_noise=0.0),
    _experts("GraniteMoeForCausalLM"),
    _experts("Llama4ForCausalLM", intermediate_size_mlp=32),
    _experts("JetMoeForCausalLM", kv_channels=4),
    _experts("JambaForCausalLM", mamba_dt_rank=4),
    _experts(
        "Qwen3NextForCausalLM",
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
    ),
    _experts("SwitchTransformersForConditionalGeneration", feed=pairs, router_jitter_noise=0.0),
    _recurrent("MambaForCausalLM"),
    _recurrent("Mamba2ForCausalLM", num_heads=8, head_dim=4, n_groups=2),
    _recurrent("FalconMambaForCausalLM"),
    _recurrent("RwkvForCausalLM"),
    _recurrent("RecurrentGemmaForCausalLM", attention_window_size=8),
    _recurrent("Lfm2ForCausalLM"),
    _recurrent("FalconH1ForCausalLM", mamba_d_ssm=32, mamba_n_heads=8, mamba_d_head=4),
    _encoder("BertForMaskedLM"),
    _encoder("RobertaForMaskedLM", max_position_embeddings=40),
    _encoder("DistilBertForMaskedLM"),
    _encoder("ElectraForMaskedLM"),
    _encoder("AlbertForMaskedLM"),
    _encoder("DebertaForMaskedLM"),
    _encoder("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _encoder("ModernBertForMaskedLM"),
    _encoder("MPNetForMaskedLM"),
    _encoder("XLNetLMHeadModel", without=["max_position_embeddings"]),
    _encoder("FNetForMaskedLM", feed=words),
    _encoder("EsmForMaskedLM"),
    _encoder("RoFormerForMaskedLM"),
    _encoder("ConvBertForMaskedLM"),
    _both("T5ForConditionalGeneration"),
    _both("UMT5ForConditionalGeneration"),
    _both("BartForConditionalGeneration"),
    _both("MBartForConditionalGeneration"),
    _both("MarianMTModel"),
    _both("PegasusForConditionalGeneration"),
    _both("BlenderbotForConditionalGeneration"),
    _both("M2M100ForConditionalGeneration"),
]
