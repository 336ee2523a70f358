"""Models of transformers, in and out, each process its own part; files may have another form."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import taktline as tl
from taktline.checkpoint import pretrained
from taktline.checkpoint.files import TensorFile, write
from taktline.checkpoint.model_state import ModelState
from taktline.checkpoint.pretrained import PretrainedFiles, conversions_of
from taktline.errors import CheckpointError, PartitionError, StateError
from taktline.stage.names import named_state
from tests.checkpoint.test_folder import full_disk
from tests.checkpoint.training import mesh_of
from tests.workers import Workers
from tests.zoo import find

IDS = torch.arange(24).reshape(4, 6) % 17
CUTS = ["model.layers.1"]
FEW = ["Qwen3MoeForCausalLM", "MixtralForCausalLM"]
OTHERS = """
Qwen2MoeForCausalLM OlmoeForCausalLM DeepseekV3ForCausalLM GptOssForCausalLM PhimoeForCausalLM
GraniteMoeForCausalLM Llama4ForCausalLM JetMoeForCausalLM JambaForCausalLM Qwen3NextForCausalLM
ViTForImageClassification BertForMaskedLM
"""


def llama(tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        use_cache=False,  # as a split has it: its values have other strides
    )
    return LlamaForCausalLM(config).eval()


def logits_of(model: Any) -> torch.Tensor:
    """In micro-batches, as a pipeline has them: products of other shapes may round otherwise."""
    return torch.cat([model(part).logits for part in IDS.chunk(2)])


def stored(folder: Path) -> dict[str, torch.Tensor]:
    files = [TensorFile(each) for each in sorted(folder.glob("*.safetensors"))]
    return {name: file.view(name) for file in files for name in file.tensors}


def require_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("tied", "largest"), [(True, 5_000), (False, 10**9)])
def test_out_and_in(tmp_path: Path, tied: bool, largest: int) -> None:
    from transformers import AutoModelForCausalLM

    model = llama(tied)
    pipe = tl.Pipeline(model, cuts=CUTS, microbatches=2, ranks=2)
    pipe.save_pretrained(tmp_path, max_shard_bytes=largest)
    assert (tmp_path / "model.safetensors.index.json").exists() == (largest < 10**9)
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    require_same(read.state_dict(), model.state_dict())
    again = tl.Pipeline.from_pretrained(tmp_path, cuts=CUTS, microbatches=2, ranks=2)
    assert torch.equal(again.eval(IDS).logits, logits_of(model))


def test_an_earlier_save_is_replaced(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    pipe = tl.Pipeline(llama(), cuts=CUTS, microbatches=2, ranks=2)
    for number, largest in enumerate((10**9, 5_000, 10_000, 10**9)):
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.fill_(number)
        pipe.save_pretrained(tmp_path, max_shard_bytes=largest)
        read: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
        again = tl.Pipeline.from_pretrained(tmp_path, cuts=CUTS, microbatches=2, ranks=2)
        for each in (*read.parameters(), *again.parameters()):
            assert (each == number).all()


def test_what_transformers_writes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    llama().bfloat16().save_pretrained(tmp_path, max_shard_size="5KB")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    pipe = tl.Pipeline.from_pretrained(tmp_path, cuts=CUTS, microbatches=2, ranks=2)
    assert {value.dtype for value in pipe.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(pipe.eval(IDS).logits, logits_of(model))


def test_a_config_makes_a_new_model() -> None:
    config = llama().config
    torch.manual_seed(0)
    pipe = tl.Pipeline.from_pretrained(config, cuts=CUTS, microbatches=2, ranks=2)
    assert pipe.eval(IDS).logits.shape == (4, 6, 32)


def test_what_is_not_there(tmp_path: Path) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors\.index\.json nor"):
        tl.Pipeline.from_pretrained(tmp_path, microbatches=2)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(StateError, match=r"lacks model\.layers\.2\.self_attn\.q_proj\.weight, "):
        tl.Pipeline.from_pretrained(tmp_path, microbatches=2)


def over_processes(rank: int, group: Any, folder: str, shape: Any, way: str | None) -> Any:
    options: Any = {"microbatches": 2, "mesh": mesh_of(group, shape), "data_parallel": way}
    pipe = tl.Pipeline.from_pretrained(folder, **options)
    held = {name for name, _ in pipe.named_parameters()}
    assert any("layers.0." in name for name in held) != ("lm_head.weight" in held)
    pipe.save_pretrained(Path(folder, "again"), max_shard_bytes=50_000)
    return pipe.eval(IDS).logits


@pytest.mark.processes
@pytest.mark.parametrize(
    ("experts", "shape", "way"),
    [
        (False, None, None),
        (False, (2, 2), "fsdp"),
        (True, None, None),
        pytest.param(True, (2, 2), "fsdp", marks=pytest.mark.matrix),
    ],
)
def test_processes(
    workers: Workers, tmp_path: Path, experts: bool, shape: Any, way: str | None
) -> None:
    model: Any = find("Qwen3MoeForCausalLM").make().eval() if experts else llama()
    model.save_pretrained(tmp_path)
    ranks = 2 if shape is None else 4
    for logits in workers.run(over_processes, str(tmp_path), shape, way, ranks=ranks):
        torch.testing.assert_close(logits, logits_of(model))
    require_same(stored(tmp_path / "again"), stored(tmp_path))
    read: Any = type(model).from_pretrained(tmp_path / "again")
    require_same(read.state_dict(), model.state_dict())


def on_a_full_disk(rank: int, group: Any, folder: str, largest: int) -> str:
    """The first rank cannot write, while others wait for its shards of the next tensor."""
    options: Any = {"cuts": CUTS, "microbatches": 2, "data_parallel": "fsdp", "timeout": 20}
    pipe = tl.Pipeline(llama(), mesh=mesh_of(group, (2, 2)), **options)
    with full_disk() if rank == 0 else nullcontext(), pytest.raises(CheckpointError) as caught:
        pipe.save_pretrained(folder, max_shard_bytes=largest)
    assert pipe.grad_norm() >= 0, "the next call works"
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize("largest", [5_000, 10**9], ids=["several files", "one file"])
def test_a_full_disk(workers: Workers, tmp_path: Path, largest: int) -> None:
    told = workers.run(on_a_full_disk, str(tmp_path), largest, ranks=4)
    assert told == [f"rank 0: cannot write {tmp_path}: OSError: [Errno 27] File too large"] * 4


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.matrix) for name in OTHERS.split())]
)
def test_files_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model: Any = find(name).make()
    model.save_pretrained(tmp_path / "theirs")
    read = PretrainedFiles(tmp_path / "theirs", model)
    tied = {id(value): read[each] for each, value in named_state(model).items() if each in read}
    for each, value in named_state(model).items():
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
