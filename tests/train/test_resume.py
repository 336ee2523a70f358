"""A resumed run equals one that went on, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import taktline as tl
from tests.train.models import CUTS, WORDS, loss_fn, pipeline
from tests.workers import Workers

GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [torch.randint(WORDS, (2, 16, 12), generator=GENERATOR) for _ in range(4)]


def noisy(output: Tensor, target: Tensor) -> Tensor:
    """Draws a number for each micro-batch."""
    return loss_fn(output, target) * (1 + torch.rand(()))


def make(**options: Any) -> tuple[tl.Pipeline, torch.optim.Optimizer]:
    pipe = pipeline(**({"microbatches": 8, "ranks": None} | options))
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-2)


def train(pipe: tl.Pipeline, optimizer: torch.optim.Optimizer, until: int) -> list[float]:
    schedule, losses = next(iter(pipe.schedules.values())), []
    while schedule.steps < until:
        tokens, target = BATCHES[schedule.steps]
        losses.append(pipe.step(tokens, target=target).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def went_on_and_resumed(folder: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """The losses and weights after the save, of both."""
    pipe, optimizer = make(**options)
    train(pipe, optimizer, 2)
    pipe.save(folder, optimizer)
    expected = train(pipe, optimizer, 4), pipe.state_dict()
    again, optimizer = make(**options)
    torch.manual_seed(99)
    again.load(folder, optimizer)
    return expected, (train(again, optimizer, 4), again.state_dict())


def require_equal(expected: Any, found: Any) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


SCHEDULES = [("1f1b", 2), ("gpipe", 2), ("zb_h1", 2), ("interleaved_1f1b", 4), ("zbv", 4)]


@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
def test_tied_weights_in_one_process(schedule: str, stages: int, tmp_path: Path) -> None:
    options = {"schedule": schedule, "ranks": 2, "cuts": CUTS[stages]}
    require_equal(*went_on_and_resumed(tmp_path, options))


@pytest.mark.parametrize("seed", [None, 3])
def test_random_numbers_in_the_loss(seed: int | None, tmp_path: Path) -> None:
    options = {"ranks": 2, "cuts": CUTS[2], "loss_fn": noisy, "seed": seed}
    require_equal(*went_on_and_resumed(tmp_path, options))


def test_with_a_seed_the_loss_draws_the_same_in_any_layout() -> None:
    found = []
    for schedule, ranks, cuts in (("1f1b", 1, []), ("gpipe", 2, CUTS[2]), ("zbv", 2, CUTS[4])):
        pipe, _ = make(schedule=schedule, ranks=ranks, cuts=cuts, loss_fn=noisy, seed=3)
        torch.manual_seed(len(found))  # the caller's generator does not matter
        tokens, target = BATCHES[0]
        found.append([pipe.step(tokens, target=target).item() for _ in range(2)])
    first, *others = found
    assert first[0] != first[1], "each step draws other numbers"
    for each in others:
        torch.testing.assert_close(each, first)


def over_processes(rank: int, group: Any, folder: Path, seed: int | None) -> list[float]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    options = {"cuts": CUTS[2], "mesh": mesh, "loss_fn": noisy, "seed": seed}
    expected, found = went_on_and_resumed(folder, options)
    require_equal(expected, found)
    return found[0]


@pytest.mark.processes
@pytest.mark.parametrize("seed", [None, 3])
def test_over_processes(workers: Workers, seed: int | None, tmp_path: Path) -> None:
    first, second = workers.run(over_processes, tmp_path, seed)
    assert first == second
