"""Ranks of different memory and speed: where the model is cut, and what the table says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import taktline as tl
from taktline.train.rank_limits import held_by, stage_bytes
from taktline.train.stage_table import StageNeeds
from taktline.train.weights import bytes_of
from tests.cli.test_commands import ok, run
from tests.workers import Workers

X = torch.linspace(-1, 1, 16 * 64).reshape(16, 64)


def model(blocks: int = 9, largest: int = 128) -> nn.Sequential:
    torch.manual_seed(0)
    widths = [128] * (blocks - 1) + [largest]
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, w), nn.GELU(), nn.Linear(w, 64)) for w in widths)
    )


def pipeline(ranks: Any, made: Any = None, **options: Any) -> tl.Pipeline:
    known = {"example": (X[:2],), "microbatches": 8, "loss_fn": nn.functional.mse_loss}
    return tl.Pipeline(model() if made is None else made, ranks=ranks, **(known | options))


def blocks_of(pipe: tl.Pipeline) -> list[int]:
    """How many blocks each stage has."""
    stages = [stage for _, stage in sorted(pipe.stages.items())]
    return [sum(isinstance(each, nn.GELU) for each in s.modules()) for s in stages]


@pytest.mark.parametrize(
    ("ranks", "schedule", "blocks"),
    [
        ([{}, {}, {}], "1f1b", [3, 3, 3]),
        ([{"speed": 1}, {"speed": 2}], "1f1b", [3, 6]),
        ([{"memory": "600KiB"}, {"memory": "5MiB"}], "1f1b", [2, 7]),  # 262 KiB each
        ([{"memory": "5MiB"}, {"memory": "600KiB", "speed": 9}], "gpipe", [7, 2]),
        ([{"memory": "600KiB"}, {"memory": "5MiB"}], "zbv", [1, 4, 3, 1]),
    ],
)
def test_cuts_by_time_within_the_memory_of_each(
    ranks: Any, schedule: str, blocks: list[int]
) -> None:
    pipe = pipeline(ranks, schedule=schedule)
    assert blocks_of(pipe) == blocks
    plain = model()
    nn.functional.mse_loss(plain(X), X).backward()
    pipe.step(X, target=X)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


def test_the_table_says_what_is_left() -> None:
    text = str(pipeline([{"memory": "1MiB"}, {"memory": "5MiB"}]))
    heading, first, second = text.splitlines()[-3:]
    assert heading.split() == [
        *("rank", "weights", "gradients", "optimizer", "activations", "messages"),
        *("total", "memory", "left"),
    ]
    assert first.split()[-4:-2] == ["1.0", "MiB"]
    assert second.split()[-4:-2] == ["5.0", "MiB"]
    assert "left" not in str(pipeline(2))


def told(rank: int, group: Any, memory: list[str]) -> Any:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    limits = [{"memory": memory[rank]}, {"memory": "5MiB"}]
    try:
        pipe = pipeline(limits, mesh=mesh)
    except tl.MismatchError as error:
        return str(error)
    return blocks_of(pipe), str(pipe).splitlines()[-2:]


@pytest.mark.processes
def test_over_processes(workers: Workers) -> None:
    first, second = workers.run(told, ["600KiB", "600KiB"])
    assert (first[0], second[0]) == ([2], [7])
    assert first[1] == second[1]
    for text in workers.run(told, ["600KiB", "700KiB"]):
        assert "option ranks is [RankLimit(memory=614400.0, speed=1.0)" in text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"ranks": [{"memory": "600KiB"}, {"memory": "900KiB"}], "made": model(9, 1024)},
            r"no rank is large enough for '8': it needs 2.0 MiB \(weights 516.2 KiB, gradients "
            r"516.2 KiB, optimizer 1.0 MiB, activations .* of one micro-batch\), and rank 1, the "
            r"largest, has 900.0 KiB",
        ),
        (
            {"ranks": [{"memory": "900KiB"}] * 2},
            r"no cut into 2 stages keeps within the memory of the ranks: in the best one, rank \d "
            r"needs 1.\d MiB of its 900.0 KiB",
        ),
        ({"ranks": [{}, {}], "memory": 1e9}, "leave out memory="),
        ({"ranks": [{}, {"speed": 2}], "schedule": "auto"}, 'leave out "speed"'),
        ({"ranks": [{}, {}], "example": None}, "pass example="),
        ({"ranks": []}, "ranks must be a whole number from 1"),
        ({"ranks": [{"gpu": 1}]}, r"ranks\[0\] must be a dict"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(tl.TaktlineError, match=text):
        pipeline(**given)


@pytest.mark.parametrize(
    ("make", "times"),
    [
        (torch.optim.AdamW, 2),
        (torch.optim.SGD, 0),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9), 1),
    ],
)
def test_the_state_of_an_optimizer(make: Any, times: int) -> None:
    layer, needs = nn.Linear(64, 64, bias=False), StageNeeds((1, 1, 1), 5, ())
    (found,) = stage_bytes([layer], [needs], make)
    state = times * layer.weight.nbytes
    assert (found.weights, found.gradients) == (layer.weight.nbytes,) * 2
    assert state <= found.optimizer <= state + 4  # AdamW counts its steps
    layer.requires_grad_(False)
    assert held_by(layer) == layer.weight.nbytes


def test_the_bytes_of_quantised_weights() -> None:
    torchao: Any = pytest.importorskip("torchao.quantization", reason="pip install torchao")
    layer = nn.Sequential(nn.Linear(64, 64, bias=False))
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    assert 64 * 64 < sum(map(bytes_of, layer.parameters())) < 2 * 64 * 64


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **dict.fromkeys(("hidden_size", "intermediate_size"), 256),
    **{"num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 512},
}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_fit_needs_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))
    words = ["fit", "config.json", "--length", "32", "--json"]
    whole = json.loads(ok(*words, "--ranks", "20MiB,60MiB"))
    assert [name.rpartition(".")[0] for name in whole["starts"]] == ["model.layers"]
    for each in whole["ranks"]:
        assert each["gradients"] == pytest.approx(each["weights"], rel=0.01)  # which has buffers
        assert each["optimizer"] == pytest.approx(2 * each["weights"], rel=0.01)
        # The cut does not count what an action or the optimizer needs for a moment.
        assert each["total"] - max(each["working"], each["updating"]) <= each["memory"]
    assert whole["ranks"][0]["weights"] < whole["ranks"][1]["weights"]
    assert json.loads(ok(*words, "--ranks", "1GiB"))["starts"] == []
    pytest.importorskip("peft")
    adapted = json.loads(ok(*words, "--ranks", "20MiB,20MiB", "--lora", "4"))
    assert all(each["gradients"] < each["weights"] / 20 for each in adapted["ranks"])
    assert "left" in ok(*words[:-1], "--ranks", "20MiB,60MiB")
    looped = ("--schedule", "looped_bfs", "-s", "3", "--ranks", "20MiB,20MiB", "--lora", "4")
    resident, streamed = (
        json.loads(ok(*words, *looped, *more))["ranks"] for more in ([], ["--stream"])
    )
    for before, after in zip(resident, streamed, strict=True):
        assert after["weights"] < 0.95 * before["weights"]
        assert after["gradients"] == before["gradients"]


@pytest.mark.parametrize(
    ("words", "missing", "text"),
    [
        ("--ranks 1KiB,2KiB", "", "no rank is large enough for"),
        ("--ranks 20", "", "the memory of rank 0, in bytes or as a text like 16GiB, must be"),
        ("--ranks 20MiB --optimizer Nadam", "", "torch.optim has no optimizer 'Nadam'"),
        ("--ranks 2GiB --lora 4", "peft", "peft is missing: pip install 'taktline[clients]'"),
        ("--ranks 2GiB,2GiB --stream", "", "'1f1b' has 1 stage on a rank; cut the model into more"),
        ("--ranks 2GiB", "transformers", "transformers is missing: pip install 'taktline[tran"),
    ],
)
def test_what_fit_refuses(
    words: str, missing: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setitem(sys.modules, missing or "nothing", None)
    result = run("fit", "config.json", "--length", "32", *words.split())
    assert (result.exit_code, text in result.stderr) == (2, True)
