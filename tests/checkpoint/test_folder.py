"""A save appears whole or not at all, in the background as well; else the one before stays."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import taktline as tl
from taktline.checkpoint import files, latest, saving
from taktline.checkpoint.files import LOCK
from taktline.errors import CheckpointError
from tests.checkpoint.training import Training, mesh_of, pipeline
from tests.workers import Workers


def names(path: Path) -> list[str]:
    return sorted({*os.listdir(path)} - {LOCK})


@contextmanager
def full_disk() -> Iterator[None]:
    """Files cannot grow: what a write says is what it says on a full disk, but for the reason."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_names_and_keep(tmp_path: Path) -> None:
    training = Training(pipeline(2, ranks=2))
    assert latest(tmp_path / "runs") is None
    for _ in range(4):
        training.run(1)
        saved = training.save(tmp_path / "runs", keep=2)
        assert latest(tmp_path / "runs") == saved
    assert names(tmp_path / "runs") == ["000003-step-3", "000004-step-4"]
    training.load(tmp_path / "runs" / "000003-step-3")
    training.save(tmp_path / "runs", keep=2)
    assert names(tmp_path / "runs") == ["000004-step-4", "000005-step-3"]
    assert training.load(tmp_path / "runs").step == 3, "the newest, not the furthest"


def test_the_latest_one_that_is_complete(tmp_path: Path) -> None:
    training = Training(pipeline(2, ranks=2))
    first, second = training.save(tmp_path), training.save(tmp_path)
    (second / "manifest.json").unlink()
    assert latest(tmp_path) == first
    with pytest.raises(CheckpointError, match=r"cannot read .*000002-step-0: FileNotFoundError"):
        training.load(second)
    (tmp_path / ".000009-step-4.saving").mkdir()
    (tmp_path / "mine").mkdir()
    saved = training.save(tmp_path, keep=2)
    assert names(tmp_path) == [first.name, second.name, saved.name, "mine"]
    assert saved.name == "000003-step-0"


def test_other_programs_read_the_files(tmp_path: Path) -> None:
    pipe = pipeline(2, ranks=2)
    tensors = load_file(pipe.save(tmp_path) / "rank-00000.safetensors")
    model = {n.removeprefix("model/"): v for n, v in tensors.items() if n.startswith("model/")}
    assert "head.weight" not in model, "a tied weight is there once"
    expected = {name: value for name, value in pipe.state_dict().items() if name in model}
    torch.testing.assert_close(model, expected, rtol=0, atol=0)
    assert len(pipe.state_dict()) == len(model) + 1


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(pipeline(2, ranks=2))
    saved = training.save(tmp_path)
    with full_disk(), pytest.raises(CheckpointError, match=r"cannot write .*File too large"):
        training.save(tmp_path)
    assert names(tmp_path) == [saved.name]
    with full_disk():
        training.save(tmp_path, async_save=True)
        saving._running[tmp_path, 0].exception()
    assert "a background save has failed: cannot write" in caplog.text
    with pytest.raises(CheckpointError, match="File too large"):
        training.save(tmp_path)
    assert names(tmp_path) == [saved.name]
    assert training.load(tmp_path).path == saved
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot save to .*runs: NotADirectoryError"):
        training.save(tmp_path / "file" / "runs")


FAILS = {
    "disk": "rank 1: cannot write ",
    "disk in the background": "rank 1: cannot write ",
    "optimizer": "rank 1: the optimizer has a parameter of shape [2, 2] that is not",
    "folder": ".000001-step-0.saving, made by rank 0, is not here",
    "folder in the background": ".000001-step-0.saving, made by rank 0, is not here",
}


def failing(rank: int, group: Any, runs: str, what: str) -> str:
    """Something is wrong on the last of two ranks."""
    training = Training(pipeline(2, mesh=mesh_of(group, None), timeout=20))
    asynchronous, full = "background" in what, "disk" in what and rank == 1
    if "folder" in what:
        runs = f"{runs}/{rank}"
    else:
        training.save(runs)
    if what == "optimizer" and rank == 1:
        training.optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())

    def save() -> None:
        with full_disk() if full else nullcontext():
            training.save(runs, async_save=asynchronous)
            saving._running[Path(runs), rank].exception()
        training.save(runs)

    with pytest.raises(CheckpointError) as caught:
        save()
    assert training.pipe.grad_norm() >= 0  # pyright: ignore
    return str(caught.value).partition(";")[0]


@pytest.mark.processes
@pytest.mark.parametrize("what", FAILS)
def test_what_fails_on_one_rank(workers: Workers, tmp_path: Path, what: str) -> None:
    told = workers.run(failing, str(tmp_path), what)
    assert told[0] == told[1]
    assert told[0].startswith("rank 1: ")
    assert FAILS[what] in told[0]
    if "folder" in what:
        assert names(tmp_path / "0") == []
    else:
        assert names(tmp_path) == ["000001-step-0"], "the one before stays"


def test_another_job_is_left_alone(tmp_path: Path) -> None:
    training = Training(pipeline(2, ranks=2))
    saved = training.save(tmp_path)
    held = files.lock(tmp_path)
    unfinished = tmp_path / ".000002-step-7.saving"
    unfinished.mkdir()
    for asynchronous in (False, True):
        with pytest.raises(CheckpointError, match=r"another job is saving to .*; use a folder of"):
            training.save(tmp_path, async_save=asynchronous)
    assert unfinished.is_dir(), "its save is still there"
    assert training.load(tmp_path).path == saved, "a load is not in its way"
    files.unlock(held)  # as when its process ends
    second = training.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [LOCK, saved.name, second.name]


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files.fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks")))
    assert Training(pipeline(2, ranks=2)).save(tmp_path).is_dir()
    assert "cannot be locked: No locks" in caplog.text


def test_the_lock_is_released_after_an_error(tmp_path: Path) -> None:
    training = Training(pipeline(2, ranks=2))
    with (
        patch("taktline.checkpoint.saving.write", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        training.save(tmp_path)
    assert os.listdir(tmp_path) == [LOCK]
    training.save(tmp_path)


@contextmanager
def lateness() -> Iterator[None]:
    """Let writing be late: what was not copied in the call has changed by then."""
    write_in_time = saving.write

    def write_late(*args: Any) -> Any:
        time.sleep(0.2)
        return write_in_time(*args)

    with patch.object(saving, "write", write_late):
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
