"""One job at a time writes to a folder of saves; another one is refused, and harms nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from taktline.checkpoint import saving
from taktline.checkpoint.saving import LOCK, lock
from taktline.errors import CheckpointError
from tests.checkpoint.training import Training, mesh_of, pipeline
from tests.workers import Workers

HOLDER = """
import sys, time
from pathlib import Path
from taktline.checkpoint.saving import lock
held = lock(Path(sys.argv[1]))
Path(sys.argv[1], ".000002-step-7.saving").mkdir()
print("holds", flush=True)
time.sleep(600)
"""


def another_job(folder: Path) -> subprocess.Popen[str]:
    """A process that is in the middle of a save."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert job.stdout.readline() == "holds\n"
    return job


def test_another_job_is_named_until_it_has_ended(tmp_path: Path) -> None:
    training = Training(pipeline(2, ranks=2))
    saved = training.save(tmp_path)
    job = another_job(tmp_path)
    try:
        text = rf"another job is saving to .*: process {job.pid} on \S+.*, since \d"
        for asynchronous in (False, True):
            with pytest.raises(CheckpointError, match=text):
                training.save(tmp_path, async_save=asynchronous)
        assert (tmp_path / ".000002-step-7.saving").is_dir(), "its save is still there"
        assert training.load(tmp_path).path == saved, "a load is not in its way"
    finally:
        job.send_signal(signal.SIGKILL)
        job.communicate()
    # Whatever has ended it, its lock has ended, too.
    assert (tmp_path / LOCK).exists()
    second = training.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [LOCK, saved.name, second.name]


def test_a_lock_that_was_released_is_not_held(tmp_path: Path) -> None:
    first = lock(tmp_path)
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
        lock(tmp_path)
    (tmp_path / LOCK).write_text("")
    with pytest.raises(CheckpointError, match="a process that has begun just now"):
        lock(tmp_path)
    first.close()
    lock(tmp_path).close()


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(saving.fcntl, "flock", flock)
    saved = Training(pipeline(2, ranks=2)).save(tmp_path)
    assert saved.is_dir()
    assert "cannot be locked: No locks available" in caplog.text


def test_it_is_released_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(pipeline(2, ranks=2))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("taktline.checkpoint.saving.write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.save(tmp_path)
    assert os.listdir(tmp_path) == [LOCK]
    training.save(tmp_path, async_save=True)
    saving.wait(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [LOCK, "000001-step-0"]


def refused(rank: int, group: Any, folder: str) -> str:
    training = Training(pipeline(2, mesh=mesh_of(group, None), timeout=20))
    with pytest.raises(CheckpointError) as caught:
        training.save(folder)
    assert training.pipe.grad_norm() >= 0  # pyright: ignore
    return str(caught.value)


@pytest.mark.processes
def test_all_ranks_name_the_other_job(workers: Workers, tmp_path: Path) -> None:
    job = another_job(tmp_path)
    try:
        told = workers.run(refused, str(tmp_path))
    finally:
        job.kill()
        job.communicate()
    assert told[0] == told[1]
    assert told[0].startswith(f"rank 0: another job is saving to {tmp_path}: process {job.pid} on")
