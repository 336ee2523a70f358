"""Models of transformers, cut by names and traced: the gradients are those of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import taktline as tl
from tests.split.transformers_models import LANGUAGES, loss, texts
from tests.workers import Workers

SIZE, COUNT = 3, 2  # of a micro-batch, and how many of them
CPU = torch.device("cpu")


def train(
    rank: int, group: dist.ProcessGroup | None, name: str, stages: int, attention: str
) -> dict[str, Tensor]:
    """A step as one of two ranks, with a model of its own; gives its gradients."""
    language = LANGUAGES[name]
    pieces = tl.split.by_names(language.make(attention), language.cuts(stages))
    assert pieces.num_stages == stages
    plan = tl.build(
        "interleaved_1f1b" if stages > 2 else "1f1b",
        ranks=2,
        microbatches=COUNT,
        stages_per_rank=stages // 2,
    )
    mine = [pieces.build_stage(stage, CPU, group) for stage in plan.placement.stages_of(rank)]
    schedule = tl.ScheduleFromPlan(mine, plan, loss)
    words, mask, target = texts(SIZE * COUNT)
    for _ in range(2):  # the second time with all shapes known
        for stage in mine:
            stage.submod.zero_grad()
        schedule.step(words, attention_mask=mask, target=target, return_outputs=False)
    return gradients(*(stage.submod for stage in mine))


def gradients(*modules: nn.Module) -> dict[str, Tensor]:
    parameters = [p for m in modules for p in m.named_parameters(remove_duplicate=False)]
    return {n: p.grad for n, p in parameters if p.grad is not None}


def plain(name: str, attention: str) -> dict[str, Tensor]:
    """The same without stages."""
    model = LANGUAGES[name].make(attention)
    words, mask, target = (part.chunk(COUNT) for part in texts(SIZE * COUNT))
    for part in range(COUNT):
        output = model(words[part], attention_mask=mask[part])
        (loss(output, target[part]) / COUNT).backward()
    return gradients(model)


def check(name: str, ranks: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    found = {n: gradient for rank in ranks for n, gradient in rank.items()}
    assert found.keys() == expected.keys()
    tied = LANGUAGES[name].tied or ()
    for key, gradient in expected.items():
        if key in tied:  # added up in another order
            torch.testing.assert_close(found[key], gradient)
        else:
            assert torch.equal(found[key], gradient), key


@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_four_stages_by_name(name: str, attention: str) -> None:
    if (name, attention) == ("gemma2", "sdpa"):
        pytest.skip("transformers has no sdpa for Gemma2")
    ranks = tl.local.run(lambda rank: train(rank, None, name, 4, attention), 2)
    check(name, ranks, plain(name, attention))


def reference(rank: int, group: dist.ProcessGroup, name: str) -> dict[str, Tensor]:
    return plain(name, "eager")


@pytest.mark.processes
@pytest.mark.parametrize("name", LANGUAGES)
def test_two_stages_by_name_over_gloo(workers: Workers, name: str) -> None:
    # The reference there, too: a process with another number of threads adds up otherwise.
    (expected,) = workers.run(reference, name, ranks=1)
    check(name, workers.run(train, name, 2, "eager"), expected)
