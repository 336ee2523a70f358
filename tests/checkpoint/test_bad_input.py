"""What is wrong with a checkpoint, or with what it is loaded into, is said before any change."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import taktline as tl
from taktline.checkpoint.files import MANIFEST, sealed
from taktline.errors import CheckpointError
from tests.checkpoint.training import DropLM, Training, mesh_of, pipeline
from tests.train.models import loss_fn
from tests.workers import Workers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    training = Training(pipeline(2, ranks=2))
    training.run(1)
    return training.save(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / saved.name)


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest so that its checksum is right."""
    content = json.loads((path / MANIFEST).read_text())["content"]
    change(content)
    (path / MANIFEST).write_text(sealed(content))


def refused(path: Path, text: str, training: Training | None = None) -> None:
    """Loading raises, and changes nothing."""
    training = training or Training(pipeline(2, ranks=2))
    before, optimizer = list(training.state()), training.optimizer.state_dict()
    with pytest.raises(CheckpointError, match=re.escape(text)):
        training.load(path)
    assert all(map(torch.equal, training.state(), before))
    assert training.optimizer.state_dict() == optimizer
    assert training.data.next == 0
    assert isinstance(training.pipe, nn.Module) or training.pipe.schedules[0].steps == 0


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(("at", "text"), [(-1, "is damaged, somewhere in bytes 0"), (20, "")])
def test_a_damaged_file(copied: Path, at: int, text: str) -> None:
    flip(copied / "rank-00000.safetensors", at)
    refused(copied, f"rank-00000.safetensors {text}".strip())


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"crc32": "0", "content": 3}', "\0", None])
def test_a_damaged_manifest(copied: Path, text: str | None) -> None:
    if text is None:
        text = (copied / MANIFEST).read_text().replace('"step": 1', '"step": 2')
    (copied / MANIFEST).write_text(text)
    refused(copied, "manifest.json")


def test_a_file_that_is_cut_off_or_missing(copied: Path) -> None:
    file = copied / "rank-00000.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    refused(copied, f"has {size - 1:,} bytes, not {size:,}; load an earlier save")
    file.unlink()
    refused(copied, "rank-00000.safetensors is missing")


def outside(content: dict[str, Any]) -> None:
    content["files"] = {"../0/rank-00000.safetensors": content["files"].popitem()[1]}


def elsewhere(content: dict[str, Any]) -> None:
    content["tensors"]["model/embed.weight"]["pieces"][0]["file"] = "../other"


def twice(content: dict[str, Any]) -> None:
    """As many elements as there should be, but not all of them."""
    pieces = content["tensors"]["model/blocks.0.wide.bias"]["pieces"]
    pieces[0] = {**pieces[0], "start": [8]}
    pieces.append(dict(pieces[0]))


def strange(content: dict[str, Any]) -> None:
    content["values"]["random/0"]["python"] = 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (outside, "rank-00000.safetensors is missing"),
        (elsewhere, "model/embed.weight is in '../other', which the manifest does not list"),
        (twice, "lacks a part of model/blocks.0.wide.bias"),
        (strange, "cannot load"),
        (lambda content: content.update(step=-1), "the step is -1, not a number of steps"),
        (lambda content: content.update(step=2**60), "not a number of steps"),
        (
            lambda content: content.update(version=2, whatever=[]),
            "has version 2 of the format, and this Taktline reads up to 1",
        ),
    ],
)
def test_an_edited_manifest(copied: Path, change: Any, text: str) -> None:
    edited(copied, change)
    refused(copied, text)


@pytest.mark.parametrize("step", [-1, 2**60])
def test_a_step_that_cannot_be_saved(tmp_path: Path, step: int) -> None:
    pipe = pipeline(2, ranks=2)
    pipe.schedules[0].steps = step
    with pytest.raises(tl.TaktlineError, match="steps must be a whole number from 0"):
        pipe.save(tmp_path)


@pytest.mark.parametrize("name", [MANIFEST, "rank-00000.safetensors"])
@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a folder", "a device"])
def test_what_is_no_regular_file_is_not_opened(copied: Path, name: str, kind: str) -> None:
    file = copied / name
    file.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "a pipe":
            os.mkfifo(file)  # without a writer, an open would wait for ever
        elif kind == "a socket":
            handle = os.open(copied, os.O_RDONLY)
            listener.bind(f"/proc/self/fd/{handle}/{name}")  # a path of theirs must be short
            os.close(handle)
        elif kind == "a folder":
            file.mkdir()
        else:
            file.symlink_to("/dev/zero")
        refused(copied, "not a regular file")
        assert tl.checkpoint.latest(copied.parent) is None


def test_state_that_an_optimizer_refuses(copied: Path) -> None:
    """Torch finds out after it has changed the optimizer."""

    def spoilt(content: dict[str, Any]) -> None:
        for name in [each for each in content["tensors"] if each.endswith("/step")]:
            del content["tensors"][name]
            content["optimizers"][0]["state"][name.split("/")[2]] = {"step": "three"}

    edited(copied, spoilt)
    training = Training(pipeline(2, ranks=2))
    training.run(1)
    before, optimizer = list(training.state()), training.optimizer.state_dict()
    with pytest.raises(CheckpointError, match="ValueError: could not convert string to float"):
        training.load(copied)
    assert all(map(torch.equal, training.state(), before))
    assert training.optimizer.state_dict() == optimizer
    assert training.run(1)


def test_no_checkpoint(tmp_path: Path) -> None:
    refused(tmp_path, f"{tmp_path} is not a checkpoint, and contains no complete one")
    refused(tmp_path / "nowhere", "nowhere is not a checkpoint, and is not there")


def test_another_model(saved: Path) -> None:
    model = DropLM()
    model.more = nn.Linear(2, 2)
    refused(saved, "is of another model: it lacks more.weight and 1 other", Training(model))
    model = DropLM()
    model.blocks = model.blocks[:3]
    text = "is of another model: this one does not have blocks.3.norm.0.weight and"
    refused(saved, text, Training(model))


def test_ties_of_another_model(tmp_path: Path) -> None:
    untied = tl.Pipeline(DropLM(tied=False), microbatches=2, loss_fn=loss_fn)
    text = "embed.weight and head.weight are one weight in the model, and two in"
    refused(untied.save(tmp_path, torch.optim.AdamW(untied.parameters())), text)


def test_another_shape_and_type(saved: Path) -> None:
    model = DropLM()
    model.blocks[1].wide = nn.Linear(8, 15)
    text = "blocks.1.wide.weight is float32[15, 8] in the model, but float32[16, 8] in"
    refused(saved, text, Training(model))
    text = "float64[13, 8] in the model, but float32[13, 8] in"
    refused(saved, text, Training(DropLM().double()))


def test_another_optimizer(saved: Path) -> None:
    pipe = pipeline(2, ranks=2)
    with pytest.raises(CheckpointError, match=r"state of torch\.AdamW.*optimizer 0 is torch\.SGD"):
        pipe.load(saved, torch.optim.SGD(pipe.parameters()))
    with pytest.raises(CheckpointError, match="are in one group of this optimizer, and were"):
        pipe.load(saved, torch.optim.AdamW(pipe.parameters()))
    two = [torch.optim.AdamW(pipe.parameters()) for _ in range(2)]
    with pytest.raises(CheckpointError, match="in none or in two"):
        pipe.load(saved, two)
    pipe.load(saved)


def test_what_was_not_saved(tmp_path: Path) -> None:
    pipe = pipeline(2, ranks=2)
    saved = pipe.save(tmp_path)
    training = Training(pipe)
    with pytest.raises(CheckpointError, match="the state of no optimizer, and optimizer 0"):
        pipe.load(saved, training.optimizer)
    with pytest.raises(CheckpointError, match=r"was saved without data=…"):
        pipe.load(saved, data=training.data)
    with pytest.raises(CheckpointError, match=r"was saved without scheduler=…"):
        pipe.load(saved, scheduler=training.schedulers)
    saved = pipe.save(tmp_path, scheduler=training.schedulers[:1])
    with pytest.raises(CheckpointError, match="the state of 1 scheduler, but you passed 2"):
        pipe.load(saved, scheduler=training.schedulers)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    pipe = pipeline(2, ranks=2)
    with pytest.raises(CheckpointError, match=r"extra\.f is <built-in.*without pickle"):
        pipe.save(tmp_path, extra={"f": print})
    with pytest.raises(CheckpointError, match="that is not in this model; make it with pipe"):
        pipe.save(tmp_path, torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(tl.TaktlineError, match="data must be an object with state_dict"):
        pipe.save(tmp_path, data=[1])
    with pytest.raises(tl.TaktlineError, match="keep must be a whole number from 1 up"):
        pipe.save(tmp_path, keep=0)
    assert not list(tmp_path.glob("*step*"))


def broken(state: dict[str, Any]) -> None:
    """Refuses every state."""
    raise ZeroDivisionError


def one_rank(rank: int, group: Any, folder: str, what: str) -> tuple[str, bool]:
    """Something is wrong on the last rank only."""
    training = Training(pipeline(2, mesh=mesh_of(group, None)))
    before = list(training.state())
    if rank == 1 and what == "optimizer":
        training.optimizer = torch.optim.SGD(training.pipe.parameters())
    if rank == 1 and what == "data":
        training.data.load_state_dict = broken
    with pytest.raises(tl.TaktlineError) as caught:
        training.load(folder)
    same = training.data.next == 0 and all(map(torch.equal, training.state(), before))
    assert training.pipe.grad_norm() >= 0  # pyright: ignore
    return str(caught.value), same


@pytest.mark.processes
def test_what_one_rank_finds_all_ranks_raise(workers: Workers, tmp_path: Path) -> None:
    workers.run(written, str(tmp_path))
    told = workers.run(one_rank, str(tmp_path), "optimizer")
    assert told[0] == told[1]
    assert told[0][0].startswith("rank 1: ")
    assert told[0][1]
    told = workers.run(one_rank, str(tmp_path), "data")
    assert told[0] == told[1]
    assert "ZeroDivisionError" in told[0][0]
    assert told[0][1]
    (save,) = tmp_path.glob("0*")
    flip(save / "rank-00001.safetensors", -1)
    told = workers.run(one_rank, str(tmp_path), "")
    assert told[0] == told[1]
    assert "rank-00001.safetensors is damaged" in told[0][0]
    assert told[0][1]


def written(rank: int, group: Any, folder: str) -> None:
    training = Training(pipeline(2, mesh=mesh_of(group, None)))
    training.run(1)
    training.save(folder)
