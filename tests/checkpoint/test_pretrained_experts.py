"""Mixtures of experts of transformers, which files have in another form than the model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import taktline as tl
from taktline.checkpoint import pretrained
from taktline.checkpoint.files import TensorFile, write
from taktline.checkpoint.model_state import ModelState, state_of
from taktline.checkpoint.pretrained import PretrainedFiles, conversions_of
from taktline.errors import CheckpointError, PartitionError, StateError
from tests.zoo import find

IDS = torch.arange(3, 43).reshape(4, 10)
FEW = ["Qwen3MoeForCausalLM", "MixtralForCausalLM"]
OTHERS = [
    "Qwen2MoeForCausalLM",
    "OlmoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "PhimoeForCausalLM",
    "GraniteMoeForCausalLM",
    "Llama4ForCausalLM",
    "JetMoeForCausalLM",
    "JambaForCausalLM",
    "Qwen3NextForCausalLM",
    "ViTForImageClassification",
    "BertForMaskedLM",
]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    files = [TensorFile(each) for each in sorted(folder.glob("*.safetensors"))]
    return {name: file.view(name) for file in files for name in file.tensors}


def require_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.matrix) for name in OTHERS)]
)
def test_files_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model: Any = find(name).make()
    model.save_pretrained(tmp_path / "theirs")
    read = PretrainedFiles(tmp_path / "theirs", model)
    tied = {id(value): read[each] for each, value in state_of(model).items() if each in read}
    for each, value in state_of(model).items():
        assert torch.equal(tied[id(value)], value), each
    state = ModelState({0: model}, list(model.state_dict()), conversions=conversions_of(model))
    pretrained.save_pretrained(state, tmp_path / "mine", 20_000)
    require_same(stored(tmp_path / "mine"), stored(tmp_path / "theirs"))


def test_a_stage_reads_its_own_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find(FEW[0]).make().save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]
    model, files = pretrained.build(tmp_path)
    assert files is not None
    first, second = tl.split.by_names(model, ["model.layers.4"])
    seen: list[str] = []
    view = TensorFile.view
    monkeypatch.setattr(TensorFile, "view", lambda self, n: seen.append(n) or view(self, n))
    tl.split.materialise(second, "cpu", state_dict=files)
    assert "model.layers.4.mlp.experts.3.up_proj.weight" in seen
    assert not [name for name in seen if "layers.3." in name or "embed" in name]
    assert len(seen) == len(set(seen)), "each is read once"
    assert all(
        parameter.is_meta for parameter in first.get_submodule("model.layers.3").parameters()
    )


def test_without_the_table_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find(FEW[0]).make().save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    with pytest.raises(StateError, match=r"lacks .*model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        tl.Pipeline.from_pretrained(tmp_path, microbatches=2)
    assert "this version of transformers has no table of names in files" in caplog.text


def test_experts_that_do_not_fit_together(tmp_path: Path) -> None:
    model: Any = find(FEW[0]).make()
    model.save_pretrained(tmp_path)
    files = {name: value.clone() for name, value in stored(tmp_path).items()}
    odd = "model.layers.0.mlp.experts.2.down_proj.weight"
    changed = {name: torch.ones(2, 2) if name == odd else each for name, each in files.items()}
    write(tmp_path / "model.safetensors", changed)
    with pytest.raises(CheckpointError, match=r"experts\.down_proj cannot be made from .*stack"):
        tl.Pipeline.from_pretrained(tmp_path, microbatches=2)


def test_a_model_that_does_not_say_what_it_takes() -> None:
    name = "WhisperForConditionalGeneration"
    config: Any = find(name).make().config
    config.architectures = [name]
    with pytest.raises(PartitionError, match=r"to cut Whisper.* into 2 stages, pass example=\(…\)"):
        tl.Pipeline.from_pretrained(config, microbatches=2, ranks=2)
