"""A resumed run equals one that went on, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

import taktline as tl
from taktline.errors import CheckpointError
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
    schedule, losses = schedule_of(pipe), []
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


class Rows:
    """Batches of a DataLoader, which draws a random number where an iteration begins."""

    def __init__(self) -> None:
        self.done = 0
        rows: Any = torch.arange(24.0).reshape(12, 2) / 24
        self.loader = DataLoader(rows, batch_size=4)

    def __iter__(self) -> Iterator[Tensor]:
        self.done %= len(self.loader)
        return self.read(iter(self.loader))

    def read(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        for batch in islice(batches, self.done, None):
            self.done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


@pytest.mark.parametrize("shared", [False, True], ids=["its loader", "the loader of all ranks"])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_beginning_to_read_again_draws_nothing_more(at: int, shared: bool, tmp_path: Path) -> None:
    """A save in the middle of an iteration, at its end, and in the middle of the next one."""

    def run(*, resumed: bool) -> list[float]:
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2)), nn.Linear(8, 2)]
        pipe = tl.Pipeline(stages, microbatches=2, ranks=2, loss_fn=nn.functional.mse_loss)
        optimizer, rows, losses = torch.optim.AdamW(pipe.parameters()), Rows(), list[float]()
        batches = pipe.loader(rows)
        data = batches if shared else rows
        if resumed:
            pipe.load(tmp_path, optimizer, data=data)
        while (steps := schedule_of(pipe).steps) < 8:
            for x in batches:
                losses.append(pipe.step(x, target=x).item())
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                if steps == at and at != 3 and not resumed:
                    pipe.save(tmp_path, optimizer, data=data)
            if steps == at == 3 and not resumed:
                pipe.save(tmp_path, optimizer, data=data)
        return losses

    assert run(resumed=False)[at:] == run(resumed=True)


def test_a_loader_without_a_position(tmp_path: Path) -> None:
    pipe = tl.Pipeline([nn.Linear(2, 2)], microbatches=2, ranks=1)
    batches = pipe.loader(DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), 2))
    with pytest.raises(CheckpointError, match=r"'DataLoader' object has no attribute 'state_dict'"):
        pipe.save(tmp_path, data=batches)


def schedule_of(pipe: tl.Pipeline) -> tl.Schedule:
    return next(iter(pipe.schedules.values()))


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
