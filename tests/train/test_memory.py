"""A limit of memory: the plan is made to fit, or the error says the least that would do."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import taktline as tl
from taktline.errors import ScheduleError
from taktline.plan import peak_memory
from taktline.train import memory, moments
from taktline.train.auto import limits_of
from taktline.train.rank_limits import held_by
from tests.runtime.test_offload import Block, assert_equal, train
from tests.workers import Workers

RANKS = 4


def made(**options: Any) -> tl.Pipeline:
    torch.manual_seed(0)
    given = {
        "example": (torch.randn(2, 8),),
        "microbatches": 4,
        "loss_fn": nn.functional.mse_loss,
        "ranks": RANKS,
        **options,
    }
    return tl.Pipeline([Block() for _ in range(RANKS)], schedule="gpipe", **given)


def limit(share: float) -> float:
    """The weights, and a share of the activations."""
    pipe = made()
    weights = held_by(pipe.stages[0])
    return float(weights + share * peak_memory(pipe.plan, pipe._built.table.work)[0])


@pytest.fixture(autouse=True)
def fast_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "speeds", lambda device: (1e9, 1e6))


def test_an_example_may_be_part_of_a_batch() -> None:
    """A view counted as much as the whole batch, so that the first stage seemed to keep it."""
    whole, part = torch.randn(2, 8), torch.randn(64, 8)[:2]
    found = [made(example=(each,)).memory() for each in (whole, part)]
    assert found[0] == found[1]


@pytest.mark.parametrize("share", [1.0, 0.75, 0.5])
def test_a_plan_that_fits(share: float) -> None:
    plain, pipe = made(), made(memory=limit(share))
    assert pipe.plan.saves_memory == (share < 1)
    with plain.trace():  # each action by itself
        expected = train(plain)
    assert_equal(train(pipe), expected)
    found = pipe.memory()
    for stage in found.values():
        assert bool(stage.host) == bool(stage.copied) == bool(stage.measured)
        assert stage.copied <= stage.measured
    assert "measured" in str(found)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"memory": 100}, "rank 0 needs .* for its weights, their gradients and an optimizer"),
        ({"memory": lambda: limit(0.0) + 1}, "gpipe does not fit .* at least .* for activations"),
        ({"memory": "1 GiB", "example": None}, "pass example="),
        ({"memory": "many"}, "memory must be a number of bytes above 0, a text such as"),
        ({"memory": ["1 GiB"]}, "memory is for 1 rank, but there are 4"),
    ],
)
def test_what_is_refused(options: dict[str, Any], text: str) -> None:
    given = {name: value() if callable(value) else value for name, value in options.items()}
    with pytest.raises(tl.TaktlineError, match=text):
        made(**given)


@pytest.mark.parametrize(
    ("given", "expected"), [("2kB", [2000.0] * 2), (["1 KiB", 5], [1024.0, 5.0]), (None, None)]
)
def test_limits(given: Any, expected: Sequence[float] | None) -> None:
    assert limits_of(given, 2) == expected


def run_limited(rank: int, group: Any, share: float) -> tuple[list[torch.Tensor], str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "speeds", lambda device: (1e9 * (rank + 1), 1e6))
        pipe = made(memory=limit_of_processes(share), ranks=None)
        return copy.deepcopy(train(pipe)[:-1]), str(pipe.memory())


def run_refused(rank: int, group: Any) -> str:
    with pytest.raises(ScheduleError) as refused:
        made(memory=limit_of_processes(0.1), ranks=None)
    assert train(made(ranks=None), steps=1)  # what follows works
    return str(refused.value)


@pytest.mark.processes
def test_all_ranks_know_that_a_limit_is_too_low(workers: Workers) -> None:
    for text in workers.run(run_refused, ranks=RANKS):
        assert "gpipe does not fit into memory=" in text


def limit_of_processes(share: float) -> float:
    pipe = made(ranks=None)
    weights = held_by(Block())
    return float(weights + share * peak_memory(pipe.plan, pipe._built.table.work)[0])


@pytest.mark.processes
def test_processes_have_one_plan(workers: Workers) -> None:
    found = workers.run(run_limited, 0.6, ranks=RANKS)
    plain = made()
    with plain.trace():
        expected = train(plain)
    steps = 4
    for rank, (tensors, text) in enumerate(found):
        assert text == found[0][1]
        own = [p.grad for p in plain.stages[rank].parameters() if p.grad is not None]
        assert_equal(tensors[:steps], expected[:steps])
        assert all(map(torch.equal, tensors[steps:], own))


class Deep(nn.Module):
    """Blocks whose middle is wide, and a large output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(4)
        )
        self.head = nn.Linear(32, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def deep(**options: Any) -> tl.Pipeline:
    torch.manual_seed(0)
    given: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4, "ranks": 2} | options
    example = (torch.randn(64, 32),)
    return tl.Pipeline(Deep(), example=example, loss_fn=nn.functional.cross_entropy, **given)


BATCH = torch.linspace(-1, 1, 4 * 64 * 32).view(-1, 32), torch.arange(4 * 64)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("options", [{}, {"checkpoint": "blocks"}])
def test_the_estimate_is_what_a_step_takes(schedule: str, options: dict[str, Any]) -> None:
    """Counted by a step with data: all that is alive at once, beside what is held all the time."""
    pipe = deep(schedule=schedule, ranks=1, **options)
    pipe.step(BATCH[0], target=BATCH[1])
    known = [*BATCH, *pipe.parameters(), *(p.grad for p in pipe.parameters() if p.grad is not None)]
    with pipe.trace(), moments.Live(known) as live:  # each action by itself
        pipe.step(BATCH[0], target=BATCH[1])
    (rank,) = pipe.memory().ranks
    expected = rank.activations + rank.messages + rank.working
    assert live.most == pytest.approx(expected, rel=0.1)


def test_the_state_is_that_of_the_optimizer() -> None:
    pipe = deep()
    weights = [sum(p.nbytes for p in stage.parameters()) for stage in pipe.stages.values()]
    parameters = list(pipe.parameters())
    for optimizer, means in [
        (None, 2),
        (torch.optim.SGD(parameters), 0),
        (torch.optim.SGD(parameters, momentum=0.9), 1),
        (torch.optim.AdamW(parameters, amsgrad=True), 3),
    ]:
        for rank, held in zip(pipe.memory(optimizer).ranks, weights, strict=True):
            assert rank.weights == rank.gradients == held
            assert rank.optimizer == pytest.approx(means * held, abs=100)  # and its counts of steps
    with pytest.raises(
        tl.TaktlineError, match="optimizer must be an optimizer of torch, not 'SGD'"
    ):
        pipe.memory("SGD")  # pyright: ignore[reportArgumentType]


def test_a_stage_that_reads_data_is_taken_as_it_was_counted() -> None:
    """With ``prepare``, it may do what cannot run without data: then the needs count."""

    class Reads(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inside(x) * (2 if x.sum().item() > 0 else 1)

    plain, pipe = deep().memory(), deep(prepare=lambda stage, _: Reads(stage)).memory()
    assert [rank.activations for rank in pipe.ranks] == [r.activations for r in plain.ranks]
    assert [rank.working for rank in pipe.ranks] == [0, 0]


def run_estimate(rank: int, group: Any) -> list[float]:
    pipe = deep(ranks=None, checkpoint="blocks")
    pipe.step(BATCH[0], target=BATCH[1])
    return [each.total for each in pipe.memory().ranks]


@pytest.mark.processes
def test_all_processes_know_the_memory_of_all(workers: Workers) -> None:
    pipe = deep(ranks=RANKS, checkpoint="blocks")
    pipe.step(BATCH[0], target=BATCH[1])
    expected = [each.total for each in pipe.memory().ranks]
    assert workers.run(run_estimate, ranks=RANKS) == [expected] * RANKS
