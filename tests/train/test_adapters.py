"""Models of peft, as they are, and on a quantised base: adapters train as in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import taktline as tl
from taktline.errors import CheckpointError
from taktline.runtime.ports import Outgoing
from taktline.split.auto import record_layers
from taktline.split.without_data import Fakes
from taktline.train.weights import require_trainable
from tests.workers import Workers

peft = pytest.importorskip("peft", reason="pip install 'taktline[clients]'")
transformers = pytest.importorskip("transformers", reason="pip install 'taktline[transformers]'")

pytestmark = [
    # peft asks models of transformers for it.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    # Where a model was not quantised by transformers, peft cannot merge adapters into it.
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated:UserWarning"),
]

TOKENS = (torch.arange(8)[:, None] * 5 + torch.arange(12)) % 64
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
LATE = range(4, 8)
"""Layers with adapters, where the first ones have none."""
CUTS = [f"base_model.model.model.layers.{at}" for at in (2, 4, 6)]


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=8, **options)
    return transformers.LlamaForCausalLM(config)


def nf4() -> Any:
    """With the linear layers of all blocks in 4 bits, by bitsandbytes."""
    bnb: Any = pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    model = llama()
    for block in model.model.layers:
        for name, linear in list(block.named_modules()):
            if isinstance(linear, nn.Linear):
                made = bnb.nn.Linear4bit(
                    *(linear.in_features, linear.out_features, False),
                    compute_dtype=torch.float32,
                    quant_type="nf4",
                )
                made.load_state_dict(linear.state_dict())
                block.set_submodule(name, made)
    return model.to("cpu")  # which quantises


def int8() -> Any:
    """The same in 8 bits, by torchao: tensors of a class of their own."""
    pytest.importorskip("torchao", reason="pip install torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # pyright: ignore

    model = llama()
    quantize_(model.model.layers, Int8WeightOnlyConfig())
    return model


BASES: dict[str, Callable[[], Any]] = {"float32": llama, "nf4": nf4, "int8": int8}


def adapted(base: str = "float32", **options: Any) -> Any:
    made = BASES[base]()
    torch.manual_seed(1)
    known = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.get_peft_model(made, peft.LoraConfig(**(known | options))).train()


def plain(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    parts = TOKENS.to(next(model.parameters()).device).chunk(4)
    losses = [model(input_ids=part, labels=part).loss / 4 for part in parts]
    for loss in losses:
        loss.backward()
    return sum(loss.item() for loss in losses), gradients(model)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def pipeline(model: Any, schedule: str = "1f1b", **options: Any) -> tl.Pipeline:
    example = {"input_ids": TOKENS[:2], "labels": TOKENS[:2]}
    return tl.Pipeline(model, example=example, schedule=schedule, microbatches=4, **options)


def require_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("task", [{}, {"task_type": "CAUSAL_LM"}], ids=["plain", "task"])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_trains_as_in_one_process(
    schedule: str, base: str, task: dict[str, Any], tmp_path: Path
) -> None:
    _, wanted = plain(adapted(base, **task))
    pipe = pipeline(adapted(base, **task), schedule, ranks=2)
    pipe.step(input_ids=TOKENS, labels=TOKENS)
    require_equal(gradients(pipe), wanted)
    assert "from counted operations" in str(pipe)
    trained = [p for p in pipe.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    optimizer.step()
    assert len(optimizer.state) == len(trained) == 32, "adapters alone have a state"
    pipe.save_pretrained(tmp_path)
    assert {f.name for f in tmp_path.iterdir() if f.suffix != ".md"} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    loaded = peft.PeftModel.from_pretrained(BASES[base](), tmp_path).eval()
    with torch.no_grad():
        wanted_logits = loaded(input_ids=TOKENS[:2]).logits
        assert torch.equal(pipe.eval(input_ids=TOKENS[:2]).logits, wanted_logits)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("base", BASES)
def test_trains_on_a_gpu_as_in_one_process(base: str) -> None:
    """The weights are quantised on the CPU, and moved."""
    _, wanted = plain(adapted(base).cuda())
    pipe = pipeline(adapted(base), ranks=2, device="cuda")
    pipe.step(input_ids=TOKENS, labels=TOKENS)
    require_equal(gradients(pipe), wanted)


def trained(rank: int, group: Any, schedule: str, late: bool, folder: str) -> Any:
    """The loss and gradients of a rank, and how many gradients it has sent in each step."""
    warnings.simplefilter("ignore", FutureWarning)
    options: Any = {"layers_to_transform": [*LATE]} if late else {}
    pipe = pipeline(adapted(**options), schedule, mesh=mesh_of(group), cuts=CUTS if late else None)
    sent, before, loss = list[int](), Outgoing.send, 0.0

    def send(self: Any, microbatch: int) -> None:
        sent[-1] += self._place[0].gradients
        before(self, microbatch)

    Outgoing.send = send
    try:
        while len(sent) < 3:
            sent.append(0)
            pipe.zero_grad()
            loss = pipe.step(input_ids=TOKENS, labels=TOKENS)
    finally:
        Outgoing.send = before
    pipe.save_pretrained(folder)
    return float(loss), gradients(pipe), sent


def mesh_of(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("schedule", "ranks", "late", "sent"),
    [
        ("1f1b", 2, False, [0, 4]),
        ("zbv", 4, False, [4, 8, 8, 4]),
        ("1f1b", 4, True, [0, 0, 0, 4]),
    ],
)
def test_over_processes(
    workers: Workers,
    schedule: str,
    ranks: int,
    late: bool,
    sent: list[int],
    tmp_path: Path,
) -> None:
    """Where the first layers are frozen throughout, no gradient is sent to their stages."""
    options: Any = {"layers_to_transform": [*LATE]} if late else {}
    loss, wanted = plain(adapted(**options))
    results = workers.run(trained, schedule, late, str(tmp_path), ranks=ranks)
    require_equal({k: v for _, found, _ in results for k, v in found.items()}, wanted)
    assert all(found == pytest.approx(loss) for found, *_ in results)
    assert [counts[2] for *_, counts in results] == sent
    names = peft.PeftModel.from_pretrained(llama(), tmp_path).state_dict()
    changed = adapted(**options).state_dict()
    assert all(torch.equal(names[name], changed[name]) for name in wanted)


def replicated(rank: int, group: Any, base: str) -> Any:
    """Two pipelines with the same batch."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipe = pipeline(adapted(base), mesh=mesh, data_parallel="ddp")
    pipe.step(input_ids=TOKENS, labels=TOKENS)
    wrapped = [s for s in pipe.stages.values() if isinstance(s, DistributedDataParallel)]
    sizes = [int(s._get_ddp_logging_data()["total_parameter_size_bytes"]) for s in wrapped]
    return gradients(pipe), sizes


@pytest.mark.processes
@pytest.mark.parametrize("base", ["float32", "nf4"])
def test_adapters_alone_are_reduced(workers: Workers, base: str) -> None:
    _, wanted = plain(adapted(base))
    found = workers.run(replicated, base, ranks=4)
    require_equal({k: v for each, _ in found for k, v in each.items()}, wanted)
    trained = sum(value.nbytes for value in wanted.values())
    assert [sizes for _, sizes in found] == [[trained // 2]] * 4


@pytest.mark.parametrize(("base", "way"), [("int8", "ddp"), ("nf4", "fsdp")])
def test_replicas_that_cannot_be_made(base: str, way: Any) -> None:
    text = rf"is quantised \(.*\), which {way} cannot copy to replicas; quantise with bitsandbytes"
    with pytest.raises(tl.MismatchError, match=text):
        require_trainable(adapted(base), way)


def test_frozen_layers_have_no_w() -> None:
    pipe = pipeline(adapted(layers_to_transform=[*LATE]), "zbv", ranks=2, cuts=CUTS)
    work: Any = pipe._built.table.work
    assert work.backward_input[:2] == work.backward_weight[:2] == (0, 0)
    for forward, inputs, weights in zip(
        work.forward[2:], work.backward_input[2:], work.backward_weight[2:], strict=True
    ):
        assert 0 < weights < inputs / 4
        assert inputs == pytest.approx(forward, rel=0.5)
    model = adapted(layers_to_transform=[*LATE])
    call = (), {"input_ids": TOKENS[:2], "labels": TOKENS[:2]}
    units = [step for step in record_layers(model, call)[1].steps if step.kind == "unit"]
    assert [step.needs_backward for step in units] == [False] * 5 + [True] * 6


def tied() -> Any:
    return adapted_base(llama(tie_word_embeddings=True), target_modules=["lm_head"])


def adapted_base(model: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, peft.LoraConfig(**options))


def unfrozen() -> Any:
    model = adapted("int8")
    model.base_model.model.model.layers[1].mlp.up_proj.weight.requires_grad_()
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            tied,
            r"an adapter is on base_model.model.lm_head.base_layer.weight, which is tied to "
            r"base_model.model.model.embed_tokens.weight: .*tie_word_embeddings=False",
        ),
        (
            unfrozen,
            r"layers.1.mlp.up_proj.weight is quantised \(Int8Tensor\), and would need a gradient, "
            r"which it cannot have: freeze it",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(tl.MismatchError, match=text):
        pipeline(make(), ranks=2)


def test_quantised_files_are_not_read_in_parts(tmp_path: Path) -> None:
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    transformers.LlamaConfig(**SIZES, quantization_config=quantised).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"are quantised, .* pass it to Pipeline"):
        tl.Pipeline.from_pretrained(tmp_path, microbatches=4, ranks=2)


def test_quantised_layers_are_recorded_without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up weights would be on the GPU, and what says how to read them still on the CPU."""
    model = adapted("nf4")
    monkeypatch.setattr(Fakes, "_run_with_data", lambda *_: pytest.fail("runs with data"))
    pipe = pipeline(model, ranks=2)
    assert pipe.step(input_ids=TOKENS, labels=TOKENS) > 0
