"""Layouts as Megatron writes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from taktline import Pipeline
from taktline.errors import PartitionError
from taktline.train.megatron_layout import cuts_of, stages_of


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("Et*3|(tt|)*2,L", ["Ettt", "tt", "tt", "L"]),
        ("Ett|ttL", ["Ett", "ttL"]),
        ("E|(t|)*3L", ["E", "t", "t", "t", "L"]),
        ("E t*2, | ((t|)*2t|)*2 L", ["Ett", "t", "t", "t", "t", "t", "t", "L"]),
        ("(Ett)|(ttL)", ["Ett", "ttL"]),
    ],
)
def test_stages_of_layouts(layout: str, stages: list[str]) -> None:
    assert stages_of(layout) == stages


@pytest.mark.parametrize(
    "layout", ["", "Ex|t", "tE|t", "Et||tL", "Et|L|t", "(Et|tL", "Et*|t", "t*0|", "((t*9999)*9999)"]
)
def test_invalid_layouts(layout: str) -> None:
    with pytest.raises(PartitionError, match="layout"):
        stages_of(layout)


@pytest.mark.slow
def test_a_model_of_transformers() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    assert cuts_of("Et|t|tt|L", model) == ["model.layers.1", "model.layers.2", "lm_head"]
    ids = torch.arange(32).reshape(4, 8)
    plain = model(input_ids=ids, labels=ids).loss
    pipe = Pipeline(model, example={"input_ids": ids[:1]}, cuts="Ett|ttL", microbatches=4, ranks=2)
    assert pipe.step(input_ids=ids, labels=ids).item() == pytest.approx(plain.item(), rel=1e-5)
    assert [len(pipe.stages), "layers.2–3" in str(pipe)] == [2, True]


def test_a_layout_for_another_model() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Tanh() for _ in range(4))})
    with pytest.raises(PartitionError, match=r"has 3 layers, and the model has no .*blocks \(4\)"):
        cuts_of("Et*2|tL", model)
    with pytest.raises(PartitionError, match="no module after its layers"):
        cuts_of("Et*4|L", model)


def test_of_two_lists_the_one_that_transformers_names() -> None:
    lists = {name: nn.ModuleList(nn.Tanh() for _ in range(4)) for name in ("experts", "layers")}
    model = nn.ModuleDict({**lists, "head": nn.Linear(2, 2)})
    with pytest.raises(PartitionError, match=r"several lists of that length: experts \(4\)"):
        cuts_of("Ett|ttL", model)
    model._pp_plan = {"layers": (["x"], ["x"]), "head": (["x"], ["logits"])}  # type: ignore[assignment]
    assert cuts_of("Ett|tt|L", model) == ["layers.2", "head"]
