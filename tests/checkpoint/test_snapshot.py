"""A save in the background has the state of the moment of the call."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import taktline as tl
from taktline.checkpoint import saving
from taktline.errors import CheckpointError
from tests.checkpoint.training import Training, mesh_of, pipeline
from tests.workers import Workers


@contextmanager
def lateness() -> Iterator[None]:
    """Let writing be late: what was not copied in the call has changed by then."""
    write_in_time = saving.write

    def write_late(*args: Any) -> Any:
        time.sleep(0.2)
        return write_in_time(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write", write_late)
        yield


def test_one_save_after_the_other(tmp_path: Path) -> None:
    training, mine = Training(pipeline(2, ranks=2)), torch.ones(1000)
    with lateness():
        training.run(1)
        state = list(training.state())
        saved = training.save(tmp_path, extra={"mine": mine}, async_save=True)
        expected = training.run(2)
        mine.zero_()
        again = Training(pipeline(2, ranks=2))
        loaded = again.load(tmp_path)
        assert (loaded.path, loaded.extra["mine"].sum()) == (saved, 1000), "a load waits for it"
        assert all(map(torch.equal, again.state(), state))
        assert again.run(2) == expected
        second = training.save(tmp_path, async_save=True, keep=1)
        third = training.save(tmp_path, async_save=True, keep=1)
        saving.wait(tmp_path)
    assert (second.exists(), third.exists()) == (False, True)


def test_a_save_that_fails_holds_up_nobody(tmp_path: Path) -> None:
    training = Training(pipeline(2, ranks=2))
    with lateness():
        saved = training.save(tmp_path, async_save=True)
        shutil.rmtree(tmp_path / f".{saved.name}.saving")
        training.run(1)
        with pytest.raises(CheckpointError, match=r"saving, made by rank 0, is not here|No such"):
            training.save(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = [nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512)) for _ in range(4)]
    pipe: Any = tl.Pipeline(
        nn.Sequential(*model),
        cuts=["2"],
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        ranks=2,
        device="cuda",
    )
    optimizer, x = torch.optim.AdamW(pipe.parameters()), torch.randn(8, 512, device="cuda")
    for _ in range(3):
        expected = {name: value.clone() for name, value in pipe.state_dict().items()}
        with lateness():
            pipe.save(tmp_path, optimizer, async_save=True)
            for _ in range(3):
                pipe.step(x, target=x)
                optimizer.step()
            saving.wait(tmp_path)
        pipe.load(tmp_path)
        assert all(torch.equal(value, expected[name]) for name, value in pipe.state_dict().items())


def in_shards(rank: int, group: Any, runs: str) -> bool:
    """Each stage in FSDP2, on two ranks."""
    training = Training(pipeline(2, mesh=mesh_of(group, (2, 2)), data_parallel="fsdp"))
    with lateness():
        training.run(1)
        expected = list(training.state())
        training.save(runs, async_save=True)
        training.run(2)
        training.load(runs)
    return all(map(torch.equal, training.state(), expected))


@pytest.mark.processes
def test_shards(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(in_shards, str(tmp_path), ranks=4) == [True] * 4
