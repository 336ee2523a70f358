"""accelerate's prepare_pippy, from the package itself: the outputs are those of the plain model."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from taktline.compat import install
from tests.workers import Workers

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.processes, pytest.mark.slow]


def make(name: str) -> tuple[Any, str]:
    """A tiny model, and the layers of which none may be cut."""
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "use_cache": False}
    if name == "gpt2":
        config = GPT2Config(n_embd=16, n_head=2, n_layer=2, n_positions=16, **sizes)
        return GPT2LMHeadModel(config).eval(), "GPT2Block"
    sizes |= {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    sizes |= {"num_attention_heads": 2, "num_hidden_layers": 2}
    if name == "bert":
        return BertForMaskedLM(BertConfig(**sizes)).eval(), "BertLayer"
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval(), "LlamaDecoderLayer"


def _inference(rank: int, group: dist.ProcessGroup, names: list[str]) -> list[float]:
    install()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    # What accelerate and transformers themselves warn of is theirs.
    warnings.simplefilter("ignore")
    from accelerate import PartialState
    from accelerate.inference import prepare_pippy

    PartialState(cpu=True)
    differences = []
    for name in names:
        model, block = make(name)
        ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = model(ids).logits
            model = prepare_pippy(
                model, example_args=(ids[:1],), no_split_module_classes=[block], num_chunks=2
            )
            output = model(ids)
        assert type(model.pippy_stage).__module__.startswith("taktline.")
        if rank == 1:
            differences.append(float((output.logits - expected).abs().max()))
    return differences


def test_prepare_pippy(clients: Workers) -> None:
    _, last = clients.run(_inference, ["gpt2", "bert", "llama"], timeout=300)
    assert len(last) == 3
    assert max(last) < 1e-5
