"""Frozen weights that are on the device only while their stage computes: nothing else changes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import taktline as tl
from taktline.stage.streaming import Streamed
from taktline.text import size_text
from tests.workers import Workers

X = torch.linspace(-1, 1, 16 * 8).reshape(16, 8).sin()
STAGES = 8


class Adapted(nn.Module):
    """A frozen layer, with a trained one of a low rank beside it."""

    def __init__(self, *, adapter: bool = True, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(8), nn.Linear(8, 8)
        self.requires_grad_(False)
        self.down = nn.Linear(8, 2) if adapter else None
        self.up, self.drop = nn.Linear(2, 8), nn.Dropout(drop)
        self.up.requires_grad_(adapter)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(self.norm(x))
        return torch.tanh(y if self.down is None else y + self.up(self.drop(self.down(x))))


class Tied(nn.Module):
    """The first and the last stage have one frozen weight, as views of it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.scale = weight, nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t()) * self.scale


def tied() -> list[nn.Module]:
    weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    return [Tied(weight), *(Adapted() for _ in range(STAGES - 2)), Tied(weight)]


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "adapters": lambda: [Adapted() for _ in range(STAGES)],
    "frozen first": lambda: [Adapted(adapter=stage > 2) for stage in range(STAGES)],
    "dropout": lambda: [Adapted(drop=0.3) for _ in range(STAGES)],
    "tied": tied,
}


def made(name: str = "adapters") -> list[nn.Module]:
    torch.manual_seed(0)
    return MODELS[name]()


def pipeline(modules: Any, schedule: str = "looped_bfs", **options: Any) -> tl.Pipeline:
    known: dict[str, Any] = {"microbatches": 4, "loss_fn": nn.functional.mse_loss, "ranks": 2}
    return tl.Pipeline(modules, schedule=schedule, **(known | options))


def trained(pipe: tl.Pipeline, steps: int = 2) -> list[Tensor]:
    """Losses and outputs, and then all gradients."""
    found: list[Tensor] = []
    for step in range(steps):
        torch.manual_seed(step)
        found += [pipe.step(X, target=X), pipe.eval(X)]
    return [*found, *gradients(pipe).values()]


def gradients(pipe: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@contextmanager
def noted(pipe: tl.Pipeline, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[set[int]]]:
    """Notes the stages whose weights are on the device, whenever some come."""
    stage_of = {streamed: stage for stage, streamed in pipe._built.streams.items()}
    there, found = set[int](), list[set[int]]()
    fetch, release = Streamed.fetch, Streamed.release

    def come(self: Streamed) -> None:
        fetch(self)
        there.add(stage_of[self])
        found.append(set(there))

    def go(self: Streamed) -> None:
        release(self)
        there.discard(stage_of[self])

    with monkeypatch.context() as patched:
        patched.setattr(Streamed, "fetch", come)
        patched.setattr(Streamed, "release", go)
        yield found


def empty(pipe: tl.Pipeline) -> bool:
    """Whether nothing that streams has memory of the device."""
    parts = [part for streamed in pipe._built.streams.values() for part in streamed._parts]
    return bool(parts) and not any(part.device.nbytes() or part.users for part in parts)


@pytest.mark.parametrize("schedule", ["looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_if_they_stayed(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = trained(pipeline(made(name), schedule))
    model = made(name)
    before = [each.data_ptr() for module in model for each in module.parameters()]
    pipe = pipeline(model, schedule, stream_weights=True)
    with noted(pipe, monkeypatch) as there:
        assert same(trained(pipe), wanted)
    own = [[{s for s in now if s % 2 == rank} for now in there] for rank in range(2)]
    assert max(len(stages) for rank in own for stages in rank) == 2
    assert empty(pipe)
    # Between steps they are the model's own tensors, where they were.
    assert [each.data_ptr() for module in model for each in module.parameters()] == before


def test_a_stage_comes_while_the_one_before_computes() -> None:
    pipe = pipeline(made(), stream_weights=True)
    pipe.step(X, target=X)
    rank = pipe._built.schedule._runner.runnable.lowered[0]
    text = " ".join(each for each in map(str, rank) if "_" not in each)
    assert text.startswith("0UNSHARD 2UNSHARD 0F0 0F1 0F2 0F3 0RESHARD 4UNSHARD 2F0")
    assert text.endswith("2RESHARD 0B3 0B2 0B1 0B0 0RESHARD")
    assert "4B0 4RESHARD 0UNSHARD 2B3" in text


def test_the_table_counts_what_is_there_at_once() -> None:
    example, memory = (X[:4],), [{"memory": "1MiB"}, {"memory": "2MiB"}]
    options: dict[str, Any] = {"example": example, "ranks": memory, "stages_per_rank": 4}
    pipe = pipeline(whole(), stream_weights=True, **options)
    base, adapter = 4 * (16 + 72), 4 * (18 + 24)
    for rank, line in enumerate(str(pipe).splitlines()[-2:]):
        mine = [each for s in range(rank, STAGES, 2) for each in pipe.stages[s].modules()]
        held = sum(isinstance(each, Adapted) for each in mine)
        weights = size_text(2 * base + held * adapter).split()
        assert line.split()[:3] == [str(rank), *weights]
    saving = pipeline(whole(), example=example, stages_per_rank=4, memory=8e3, stream_weights=True)
    assert saving.plan.saves_memory
    assert same(trained(saving), trained(pipeline(made())))


def test_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, wanted = pipeline(made(), stream_weights=True), trained(pipeline(made()))
    module: Any = pipe.stages[5]
    forward, calls = module.forward, []

    def fails(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) == 2:
            raise RuntimeError("no luck")
        return forward(x)

    with monkeypatch.context() as patched:
        patched.setattr(module, "forward", fails)
        with pytest.raises(tl.StageError, match=r"rank 1, stage 5, micro-batch 1.*no luck"):
            pipe.step(X, target=X)
    assert empty(pipe)
    pipe.zero_grad()
    assert same(trained(pipe), wanted)


def test_what_is_loaded_between_steps_counts(tmp_path: Path) -> None:
    other = [copy.deepcopy(module) for module in made()]
    with torch.no_grad():
        for module in other:
            module.get_parameter("base.weight").mul_(2)
    wanted = pipeline(other)
    pipe = pipeline(made(), stream_weights=True)
    pipe.step(X, target=X)
    pipe.load_state_dict(wanted.state_dict())
    assert torch.equal(pipe.eval(X), wanted.eval(X))
    pipe.zero_grad()
    again = pipeline(made(), stream_weights=True)
    again.load(pipe.save(tmp_path))
    assert torch.equal(again.eval(X), wanted.eval(X))
    assert pipe.verify(nn.Sequential(*made()), X, target=X)


def test_a_streamed_weight_stays_frozen() -> None:
    pipe = pipeline(made(), stream_weights=True)
    pipe.stages[2].get_parameter("base.bias").requires_grad_()
    with pytest.raises(tl.StageError, match=r"base.bias streams, so it stays frozen.*another pipe"):
        pipe.step(X, target=X)


def whole() -> nn.Module:
    return nn.Sequential(*made())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "1f1b"}, r"'1f1b' has 1 stage on a rank; .*schedule=\"looped_bfs\", stages_"),
        ({"schedule": "auto", "example": (X[:4],)}, 'schedule="auto" measures stages whose'),
        ({"data_parallel": "fsdp"}, 'which fsdp has cut up; pass data_parallel="ddp"'),
        ({"model": nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))}, "the model has none"),
    ],
)
def test_what_cannot_stream_is_refused(options: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"model": whole(), "schedule": "looped_bfs"} | options
    stages = {"1f1b": 2, "looped_bfs": 8}.get(given["schedule"])
    given["cuts"] = stages and [str(stage) for stage in range(1, stages)]
    with pytest.raises(tl.TaktlineError, match=text):
        pipeline(given.pop("model"), stream_weights=True, **given)


def mesh_of(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))


TOKENS = (torch.arange(8)[:, None] * 5 + torch.arange(12)) % 64


def llama() -> Any:
    peft: Any = pytest.importorskip("peft", reason="pip install 'taktline[clients]'")
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=8, num_attention_heads=2, tie_word_embeddings=True
    )
    made = transformers.LlamaForCausalLM(config)
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.get_peft_model(made, peft.LoraConfig(**options, task_type="CAUSAL_LM")).train()


def language(rank: int, group: Any, stream: bool) -> Any:
    """Adapters of a language model with tied embeddings; over four ranks with replicas."""
    warnings.simplefilter("ignore")
    options: dict[str, Any] = {"mesh": mesh_of(group)}
    if group.size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        options = {"mesh": mesh, "data_parallel": "ddp"}
    pipe = tl.Pipeline(
        llama(),
        example={"input_ids": TOKENS[:2], "labels": TOKENS[:2]},
        schedule="looped_bfs",
        stages_per_rank=4,
        microbatches=4,
        stream_weights=stream,
        **options,
    )
    losses = [pipe.step(input_ids=TOKENS, labels=TOKENS) for _ in range(2)]
    texts = pipe.generate(TOKENS[:2, :4], max_new_tokens=3)
    return losses, gradients(pipe), texts, not stream or empty(pipe)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 4])
def test_over_processes(workers: Workers, ranks: int) -> None:
    pytest.importorskip("peft")
    wanted = workers.run(language, False, ranks=ranks)
    for found, known in zip(workers.run(language, True, ranks=ranks), wanted, strict=True):
        assert found[0] == known[0]
        assert found[1].keys() == known[1].keys()
        assert same([*found[1].values()], [*known[1].values()])
        assert torch.equal(found[2], known[2])
        assert found[3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["adapters", "tied"])
def test_on_a_gpu(name: str, captured: bool) -> None:
    wanted = trained(pipeline(made(name), device="cuda"), 7)
    pipe = pipeline(made(name), device="cuda", stream_weights=True, cuda_graphs=captured)
    assert same(trained(pipe, 7), wanted)
    assert empty(pipe)
    assert {p.device.type for p in pipe.parameters() if not p.requires_grad} == {"cpu"}
    assert ("captured" in str(pipe)) == captured
