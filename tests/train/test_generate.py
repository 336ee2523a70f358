"""Texts that a pipeline generates are those of the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import taktline as tl
from tests.split.transformers_models import LANGUAGES, WORDS, Language
from tests.workers import Workers

pytestmark = pytest.mark.slow

EXPERTS = {**LANGUAGES["llama"].sizes, "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    **LANGUAGES,
    # Its layers cannot run without data.
    "mixtral": Language("MixtralForCausalLM", "MixtralConfig", EXPERTS, "model.layers"),
}
ROWS, LENGTH, NEW = 5, 6, 5
NEVER = 1000


def prompts(words: int = WORDS) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, words, (ROWS, LENGTH), generator=generator)


def padded() -> tuple[Tensor, Tensor]:
    """Texts of several lengths, with nothing on their left."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[1, :2] = mask[3, :4] = 0
    return prompts() * mask, mask


def language(name: str) -> Any:
    """A model with large weights, which does not say the same word again and again."""
    model: Any = MODELS[name].make().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3, generator=generator)
    return model


def pipeline(name: str, **options: Any) -> tl.Pipeline:
    example = (prompts()[:2],)
    usual = {"example": example, "microbatches": 3, "ranks": 2}
    return tl.Pipeline(language(name), **(usual | options))


@pytest.fixture(scope="module")
def llama() -> tl.Pipeline:
    """For those that do not train it."""
    return pipeline("llama")


def greedy(name: str, ids: Tensor, **options: Any) -> Tensor:
    return language(name).generate(ids, max_new_tokens=NEW, do_sample=False, **options)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("gpt2", "zbv"),
        ("llama", "1f1b"),
        ("gemma2", "1f1b"),
        ("mixtral", "1f1b"),
    ],
)
def test_the_words_of_the_plain_model(name: str, schedule: str) -> None:
    pipe = pipeline(name, schedule=schedule)
    expected = greedy(name, prompts(), eos_token_id=NEVER)
    found = pipe.generate(prompts(), max_new_tokens=NEW, eos_token_id=[])
    assert torch.equal(found, expected)
    assert len(expected[:, LENGTH:].unique()) >= ROWS
    ids, mask = padded()
    expected = greedy(name, ids, attention_mask=mask, eos_token_id=NEVER)
    found = pipe.generate(ids, max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    assert torch.equal(found, expected)


def test_a_text_ends_with_its_last_word(llama: tl.Pipeline) -> None:
    ids = prompts()
    free = greedy("llama", ids, eos_token_id=NEVER)
    ends = [int(free[0, LENGTH + 1]), int(free[1, LENGTH + 3])]
    expected = greedy("llama", ids, eos_token_id=ends, pad_token_id=0)
    found = llama.generate(ids, max_new_tokens=NEW, eos_token_id=ends)
    assert torch.equal(found, expected)
    assert (found[0, LENGTH + 2 :] == 0).all()
    alone = llama.generate(ids[:1], max_new_tokens=NEW, eos_token_id=ends[0])
    assert torch.equal(alone, free[:1, : LENGTH + 2])


class Causal(nn.Module):
    """A language model of somebody's own: each word depends on the mean of those before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 13)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)).cumsum(1)
        return self.head(x)


def test_a_model_of_ones_own() -> None:
    model, ids = Causal(), prompts(13)
    pipe = tl.Pipeline(Causal(), example=(ids[:2],), microbatches=3, ranks=2)
    expected = ids
    for _ in range(NEW):
        expected = torch.cat([expected, model(expected)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(pipe.generate(ids, max_new_tokens=NEW), expected)
    first = expected[:1]
    ends = int(first[0, LENGTH + 2])
    end = first[0, LENGTH:].tolist().index(ends)
    found = pipe.generate(ids[:1], max_new_tokens=NEW, eos_token_id=ends)
    assert torch.equal(found, first[:, : LENGTH + end + 1])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ids": torch.ones(3, dtype=torch.int64)}, "ids must be a tensor [rows, length] of token"),
        ({"ids": torch.ones(2, 3)}, "ids must be a tensor [rows, length] of token ids"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number from 1 up"),
        ({"attention_mask": torch.zeros(5, 6)}, "with 0 for padding on the left"),
    ],
)
def test_arguments_that_are_refused(options: dict[str, Any], text: str, llama: tl.Pipeline) -> None:
    with pytest.raises(tl.TaktlineError) as refused:
        llama.generate(**({"ids": prompts(), "max_new_tokens": NEW} | options))
    assert text in str(refused.value)


def test_models_that_are_refused() -> None:
    with pytest.raises(tl.TaktlineError, match="is not a causal language model"):
        pipeline("bert").generate(prompts(), max_new_tokens=NEW)
    stages = [nn.Embedding(WORDS, 4), nn.Flatten()]
    pipe = tl.Pipeline(stages, microbatches=1, ranks=2)
    with pytest.raises(tl.TaktlineError, match=r"return logits \[rows, length, words\]"):
        pipe.generate(prompts(), max_new_tokens=NEW)


def over_processes(rank: int, group: Any) -> tuple[list[Tensor], str]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    pipe = pipeline("llama", mesh=mesh, ranks=None)
    ids, mask = padded()
    found = [
        pipe.generate(prompts(), max_new_tokens=NEW, eos_token_id=[]),
        pipe.generate(ids, max_new_tokens=NEW, eos_token_id=[], attention_mask=mask),
    ]
    with pytest.raises(tl.MismatchError) as refused:
        pipe.generate(prompts() + rank, max_new_tokens=NEW)
    with pytest.raises(tl.TaktlineError, match="max_new_tokens must be"):
        pipe.generate(prompts(), max_new_tokens=rank)
    return found, str(refused.value)


@pytest.mark.processes
def test_over_processes(workers: Workers) -> None:
    ids, mask = padded()
    expected = [
        greedy("llama", prompts(), eos_token_id=NEVER),
        greedy("llama", ids, attention_mask=mask, eos_token_id=NEVER),
    ]
    for found, refused in workers.run(over_processes):
        assert all(map(torch.equal, found, expected))
        assert "generate() was called with other texts or options on some ranks" in refused


def with_replicas(rank: int, group: Any, end: int) -> tuple[list[Tensor], list[str]]:
    """Each replica continues a text of its own; then they differ, and one refuses its texts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipe = pipeline("llama", mesh=mesh, ranks=None, data_parallel="fsdp")
    mine = prompts()[pipe.replica : pipe.replica + 1]
    errors = list[str]()
    for texts, new in ((prompts(), 3 + 2 * pipe.replica), (prompts()[: 1 - pipe.replica], 3)):
        with pytest.raises(tl.TaktlineError) as caught:
            pipe.generate(texts, max_new_tokens=new)
        errors.append(str(caught.value))
    found = [
        pipe.generate(mine, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=0)
        for ends in ([], end)
    ]
    return found, errors


@pytest.mark.processes
def test_replicas_generate_texts_of_their_own(workers: Workers) -> None:
    first, second = (greedy("llama", prompts()[at : at + 1], eos_token_id=NEVER) for at in range(2))
    end = int(first[0, LENGTH + 1])
    assert end not in second[0, LENGTH:]
    results = workers.run(with_replicas, end, ranks=4)
    for rank, ((whole, ended), (different, empty)) in enumerate(results):
        assert torch.equal(whole, (first, second)[rank % 2])
        assert torch.equal(ended, (first[:, : LENGTH + 2], second)[rank % 2])
        assert different.endswith("and the same max_new_tokens to all replicas")
        assert "ids must be a tensor [rows, length] of token ids" in empty


def test_training_goes_on() -> None:
    ids = prompts()[:4]  # in parts of the example's size: each other size is recorded anew
    pipe, other = (pipeline("llama", microbatches=2) for _ in range(2))
    pipe.train()
    other.train()
    for step in range(2):
        assert pipe.step(ids, labels=ids) == other.step(ids, labels=ids)
        if not step:
            pipe.generate(ids, max_new_tokens=2)
    assert all(module.training for module in pipe.stages.values())
    assert pipe.grad_norm() == other.grad_norm()
    assert pipe.eval(ids).logits.shape == (len(ids), LENGTH, WORDS)
