"""Models of transformers, cut by names and by pipeline(): the gradients are those of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import taktline as tl
from tests.split.training import gradients
from tests.split.transformers_models import LANGUAGES, loss, texts
from tests.workers import Workers

SIZE, COUNT = 3, 2  # of a micro-batch, and how many of them
CPU = torch.device("cpu")


OFTEN = ("gpt2", "llama", "bert")


def some(names: Iterable[str]) -> list[Any]:
    """Names of models, of which most run in the matrix alone."""
    rare = [pytest.mark.matrix]
    return [pytest.param(name, marks=[] if name in OFTEN else rare) for name in names]


def cut(name: str, stages: int, attention: str, pipe: bool) -> tl.split.Pieces | tl.Pipe:
    language = LANGUAGES[name]
    model: Any = language.make(attention)
    cuts = language.cuts(stages)
    if not pipe:
        return tl.split.by_names(model, cuts)
    words, mask, _ = texts(SIZE)
    spec = dict.fromkeys(cuts, tl.SplitPoint.BEGINNING)
    return tl.pipeline(model, (words,), {"attention_mask": mask}, split_spec=spec)


def train(
    rank: int, group: dist.ProcessGroup | None, pieces: tl.split.Pieces | tl.Pipe
) -> dict[str, Tensor]:
    """A step as one of two ranks; returns its gradients."""
    several = pieces.num_stages // 2
    schedule = "1f1b" if several == 1 else "interleaved_1f1b"
    plan = tl.build(schedule, ranks=2, microbatches=COUNT, stages_per_rank=several)
    mine = [pieces.build_stage(stage, CPU, group) for stage in plan.placement.stages_of(rank)]
    schedule = tl.ScheduleFromPlan(mine, plan, loss)
    words, mask, target = texts(SIZE * COUNT)
    output = None
    for _ in range(2):  # the second time with all shapes known
        for stage in mine:
            stage.submod.zero_grad()
        output = schedule.step(words, attention_mask=mask, target=target)
    assert (output is not None) == (pieces.num_stages - 1 in plan.placement.stages_of(rank))
    return gradients(*(stage.submod for stage in mine))


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
    tied = LANGUAGES[name].tied or ()
    for key, gradient in expected.items():
        if key not in found:  # another name of one that is there
            assert any(gradient is expected[other] for other in found), key
        elif key in tied:  # added up in another order
            torch.testing.assert_close(found[key], gradient)
        else:
            assert torch.equal(found[key], gradient), key


# Each with the attention that it has by default; transformers has no sdpa for Gemma2.
BY_NAME = [(name, "eager" if name == "gemma2" else "sdpa") for name in LANGUAGES]
EAGER = [(name, "eager") for name in LANGUAGES if (name, "eager") not in BY_NAME]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "attention"),
    [*BY_NAME, *(pytest.param(*each, marks=pytest.mark.matrix) for each in EAGER)],
)
def test_four_stages_by_name(name: str, attention: str) -> None:
    pieces = [cut(name, 4, attention, pipe=False) for _ in range(2)]
    ranks = tl.local.run(lambda rank: train(rank, None, pieces[rank]), 2)
    check(name, ranks, plain(name, attention))


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", some(LANGUAGES))
def test_four_stages_of_a_pipe(name: str) -> None:
    pieces = cut(name, 4, "eager", pipe=True)
    ranks = tl.local.run(lambda rank: train(rank, None, pieces), 2)
    check(name, ranks, plain(name, "eager"))


def train_own(
    rank: int, group: dist.ProcessGroup, name: str, stages: int, attention: str, pipe: bool
) -> dict[str, Tensor]:
    return train(rank, group, cut(name, stages, attention, pipe))


def reference(rank: int, group: dist.ProcessGroup, name: str, attention: str) -> dict[str, Tensor]:
    return plain(name, attention)


@pytest.mark.processes
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", some(LANGUAGES))
def test_over_gloo(workers: Workers, name: str) -> None:
    attention = dict(BY_NAME)[name]
    # The reference there, too: a process with another number of threads adds up otherwise.
    (expected,) = workers.run(reference, name, attention, ranks=1)
    for stages in (2, 4):
        check(name, workers.run(train_own, name, stages, attention, False), expected)
    check(name, workers.run(train_own, name, 2, attention, True), expected)
