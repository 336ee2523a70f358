"""A training that is saved, and goes on elsewhere as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import taktline as tl
from taktline import checkpoint
from tests.checkpoint.training import Data, DropLM, Training, mesh_of, pipeline
from tests.workers import Workers

SCHEDULES = [("1f1b", 2, 2), ("zbv", 2, 4), ("interleaved_1f1b", 2, 4), ("1f1b", 1, 1)]


@pytest.mark.parametrize("seed", [None, 3], ids=["drawn", "seeded"])
@pytest.mark.parametrize(("schedule", "ranks", "stages"), SCHEDULES)
def test_the_same_layout_goes_on_to_the_last_bit(
    tmp_path: Path, schedule: str, ranks: int, stages: int, seed: int | None
) -> None:
    torch.manual_seed(5)
    first = Training(pipeline(stages, schedule, ranks=ranks, seed=seed))
    first.run(3)
    saved = first.save(tmp_path, extra={"epoch": (1, None)})
    expected = first.run(3)
    torch.manual_seed(9)
    again = Training(pipeline(stages, schedule, ranks=ranks, seed=seed))
    again.run(1)
    loaded = again.load(tmp_path)
    assert (loaded.path, loaded.step, loaded.extra) == (saved, 3, {"epoch": (1, None)})
    assert again.run(3) == expected
    for mine, other in zip(again.state(), first.state(), strict=True):
        assert torch.equal(mine, other)


RESUMED: list[Any] = [
    ("1f1b", 2, {}),
    ("zbv", 4, {}),
    ("zbv", 4, {"seed": 3}),
    # FSDP makes two parameters of a tied weight, one for each stage, each with a state of its own.
    ("zbv", 4, {"data_parallel": "fsdp", "dropout": 0.0}),
]


def resumed(rank: int, group: Any, folder: str, schedule: str, stages: int, options: Any) -> Any:
    torch.manual_seed(rank)
    mesh = mesh_of(group, (2, 2) if "data_parallel" in options else None)
    training = Training(pipeline(stages, schedule, mesh=mesh, **options))
    if checkpoint.latest(folder) is not None:
        training.load(folder)
    else:
        training.run(2)
        training.save(folder)
    return training.run(2)


@pytest.mark.processes
@pytest.mark.parametrize(("schedule", "stages", "options"), RESUMED)
def test_processes_go_on_to_the_last_bit(
    workers: Workers, tmp_path: Path, schedule: str, stages: int, options: Any
) -> None:
    ranks = 4 if "data_parallel" in options else 2
    first = workers.run(resumed, str(tmp_path), schedule, stages, options, ranks=ranks)
    assert workers.run(resumed, str(tmp_path), schedule, stages, options, ranks=ranks) == first


def moved(rank: int, group: Any, folder: str, schedule: str, stages: int, shape: Any, way: Any):
    """Some steps in one layout, from the latest save on."""
    mesh = mesh_of(group, shape)
    training = Training(pipeline(stages, schedule, dropout=0.0, mesh=mesh, data_parallel=way))
    if checkpoint.latest(folder) is not None:
        training.load(folder)
    losses = training.run(2)
    assert isinstance(training.pipe, tl.Pipeline)
    training.pipe.eval(Data().batch()[0])  # leaves the shards of FSDP2 gathered
    training.save(folder)
    return losses


LAYOUTS: list[Any] = [
    (2, "1f1b", 2, None, None),
    (4, "1f1b", 2, (2, 2), "fsdp"),
    (2, "zbv", 4, None, None),
    (4, "1f1b", 1, (1, 4), "fsdp"),
    (4, "zbv", 4, (2, 2), "ddp"),
    (3, "interleaved_1f1b", 6, None, None),
    (4, "1f1b", 2, (2, 2), "fsdp"),
]


@pytest.mark.processes
def test_processes_in_other_layouts(workers: Workers, tmp_path: Path) -> None:
    expected = Training(pipeline(4, ranks=4, dropout=0.0)).run(2 * len(LAYOUTS) + 4)
    found: list[float] = []
    for processes, *layout in LAYOUTS:
        losses = workers.run(moved, str(tmp_path), *layout, ranks=processes)
        assert losses == [losses[0]] * processes
        found += losses[0]
    plain = Training(DropLM(0.0))
    assert plain.load(tmp_path).step == len(found)
    found += plain.run(2)
    assert isinstance(plain.pipe, nn.Module)
    whole = tl.Pipeline(plain.pipe, microbatches=4, loss_fn=nn.functional.mse_loss)
    whole.save(tmp_path, plain.optimizer, scheduler=plain.schedulers, data=plain.data)
    last = Training(pipeline(8, "zbv", ranks=4, dropout=0.0))
    last.load(tmp_path)
    found += last.run(2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
