"""A few of the zoo's architectures; ``make zoo`` runs all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from taktline import split
from tests.workers import Workers
from tests.zoo import costs, find, zoo
from tests.zoo.architecture import Architecture
from tests.zoo.diffusion import DIFFUSION
from tests.zoo.images import IMAGES
from tests.zoo.page import PAGE, Result, read, shortened, write
from tests.zoo.snapshot import snapshot
from tests.zoo.trial import PLACES, Place, compare, over_processes, plain, train

SAMPLE = [
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "BertForMaskedLM",
    "WhisperForConditionalGeneration",
    "ViTForImageClassification",
    "Llama as in torchtitan",
    "PoolFormerForImageClassification",
    "mixture of experts with add_loss",
    "UNet2DModel",
]


@pytest.mark.zoo
@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", [pytest.param(PLACES[0], marks=pytest.mark.matrix), PLACES[-1]])
@pytest.mark.parametrize("name", SAMPLE)
def test_trains_as_the_plain_model(name: str, place: Place) -> None:
    architecture = find(name)
    compare(train(architecture, place), plain(architecture))


@pytest.mark.zoo
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.matrix) for n in SAMPLE[1:]] + SAMPLE[:1]
)
def test_the_model_stays_as_it_was(name: str) -> None:
    architecture = find(name)
    model = architecture.make()
    before = snapshot(model)
    split.auto(model, 2, architecture.call(2))
    changed = [one[0] for one, other in zip(before, snapshot(model), strict=True) if one != other]
    assert not changed


@pytest.mark.zoo
@pytest.mark.sampled(4)
@pytest.mark.parametrize("architecture", DIFFUSION[::-1], ids=lambda each: each.name)
def test_models_of_diffusers(architecture: Architecture) -> None:
    compare(train(architecture, PLACES[2]), plain(architecture))


@pytest.mark.zoo
@pytest.mark.parametrize("architecture", IMAGES, ids=lambda each: each.name)
def test_models_of_timm_and_torchvision(architecture: Architecture) -> None:
    pytest.importorskip(architecture.needs, reason="pip finds none for a torch without CUDA")
    compare(train(architecture, PLACES[0]), plain(architecture))


MIXTRAL, DEEPSEEK = "MixtralForCausalLM", "DeepseekV3ForCausalLM"


@pytest.mark.zoo
@pytest.mark.parametrize("name", [MIXTRAL, pytest.param(DEEPSEEK, marks=pytest.mark.matrix)])
def test_experts_in_low_precision(name: str) -> None:
    architecture = find(name)
    low = replace(architecture, build=lambda: architecture.build().to(torch.bfloat16))
    compare(train(low, PLACES[1]), plain(low))


@pytest.mark.zoo
@pytest.mark.parametrize("name", [pytest.param(MIXTRAL, marks=pytest.mark.matrix), DEEPSEEK])
def test_experts_in_mixed_precision(name: str) -> None:
    architecture = find(name)
    expected = plain(architecture, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = train(architecture, PLACES[1])
    compare(found, expected)


@pytest.mark.zoo
@pytest.mark.processes
@pytest.mark.parametrize("name", ["OPTForCausalLM", "GPT with a tied head"])
def test_trains_as_the_plain_model_over_processes(name: str, workers: Workers) -> None:
    assert workers.run(over_processes, name, Place("zbv", 2, 4)) == [None, None]


MEASURED = [
    "GPT2LMHeadModel",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
    "DLRM",
    "U-Net",
    "mixture of experts with add_loss",
]


@pytest.mark.zoo
@pytest.mark.matrix
def test_counted_costs_are_like_times() -> None:
    found = [costs.compare(find(name)) for name in MEASURED]
    told = costs.report(found)
    # Layers as small as these take up to five times as long as others that cost as much.
    assert max(each.ratio for each in found) < 10, told
    assert costs.correlation_of(found) > 0.5, told


def test_the_page_lists_the_whole_zoo() -> None:
    names = [architecture.name for architecture in zoo()]
    assert len(set(names)) == len(names) >= 60
    results = read(PAGE.read_text())
    assert list(results) == names
    assert write(zoo(), results) == PAGE.read_text()


def test_the_page_counts_what_was_run() -> None:
    first, second, third = zoo()[:3]
    results = {
        first.name: Result("by name", 8, 8),
        second.name: Result("by name", 4, None, "a | b"),
        third.name: Result("no", 0, 0, "not at all"),
    }
    text = write([first, second, third], results)
    assert "| in one process | 2 of 3 | 1 |" in text
    assert "| in processes, over gloo | 1 of 2 | 1 |" in text
    assert read(text) == results


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("PartitionError: 3 layers cannot be cut; say where", "3 layers cannot be cut"),
        ("StageError: rank 0, stage 2, micro-batch 1 (2F1): ValueError: no", "no"),
        ("StopIteration: ", ""),
    ],
)
def test_errors_are_shortened(text: str, short: str) -> None:
    assert shortened(text) == short
    assert len(shortened(text * 40)) <= 160
