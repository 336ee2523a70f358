"""What is wrong with a checkpoint, or with what it is loaded into, is said before any change."""

from __future__ import annotations

import json
import os
import re
import shutil
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


def twice(content: dict[str, Any]) -> None:
    """As many elements as there should be, but not all of them."""
    pieces = content["tensors"]["model/blocks.0.wide.bias"]["pieces"]
    pieces[0] = {**pieces[0], "start": [8]}
    pieces.append(dict(pieces[0]))


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "safetensors is missing": lambda c: c.update(
        files={f"../{k}": v for k, v in c["files"].items()}
    ),
    "lacks a part of model/blocks.0.wide.bias": twice,
    "has version 2 of the format, and": lambda content: content.update(version=2, whatever=[]),
}


@pytest.mark.parametrize("text", EDITS)
def test_an_edited_manifest(copied: Path, text: str) -> None:
    edited(copied, EDITS[text])
    refused(copied, text)


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "safetensors is damaged, somewhere in bytes 0": lambda file, _: flip(file, -1),
    "the header of": lambda file, _: flip(file, 8),
    "bytes, not": lambda file, _: os.truncate(file, 1000),
    "safetensors is missing": lambda file, _: file.unlink(),
    "manifest.json": lambda _, manifest: manifest.write_text('{"crc32": "0", "content": 3}'),
    "manifest.json is damaged": lambda _, manifest: manifest.write_text(
        manifest.read_text().replace('"step": 1', '"step": 2')
    ),
}


@pytest.mark.parametrize("text", DAMAGE)
def test_damaged_files(copied: Path, text: str) -> None:
    DAMAGE[text](copied / "rank-00000.safetensors", copied / MANIFEST)
    refused(copied, text)


@pytest.mark.parametrize("name", [MANIFEST, "rank-00000.safetensors"])
@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device"])
def test_what_is_no_regular_file_is_not_opened(copied: Path, name: str, kind: str) -> None:
    file = copied / name
    file.unlink()
    if kind == "a pipe":
        os.mkfifo(file)  # without a writer, an open would wait for ever
    elif kind == "a folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero")
    refused(copied, "not a regular file")
    assert (tl.checkpoint.latest(copied.parent) is None) == (name == MANIFEST)


def spoilt_state(content: dict[str, Any]) -> None:
    for name in [each for each in content["tensors"] if each.endswith("/step")]:
        del content["tensors"][name]
        content["optimizers"][0]["state"][name.split("/")[2]] = {"step": "three"}


OWNERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "cannot load": lambda content: content["values"]["random/0"].update(python=3),
    "ValueError: could not convert string to float": spoilt_state,
}


@pytest.mark.parametrize("text", OWNERS)
def test_state_that_its_owner_refuses(copied: Path, text: str) -> None:
    """Only torch finds out, when other objects have theirs; weights and optimizers stay."""
    edited(copied, OWNERS[text])
    training = Training(pipeline(2, ranks=2))
    training.run(1)
    before, optimizer = list(training.state()), training.optimizer.state_dict()
    with pytest.raises(CheckpointError, match=text):
        training.load(copied)
    assert all(map(torch.equal, training.state(), before))
    assert training.optimizer.state_dict() == optimizer
    assert training.run(1)


OTHERS: dict[str, Callable[[DropLM], object]] = {
    "lacks more.weight and 1 other": lambda m: m.add_module("more", nn.Linear(2, 2)),
    "does not have blocks.3.norm.0.weight and": lambda m: m.blocks.pop(3),
    "float32[15, 8] in the model, but float32[16, 8] in": (
        lambda m: m.blocks[1].add_module("wide", nn.Linear(8, 15))
    ),
    "float64[13, 8] in the model, but float32[13, 8] in": lambda m: m.double(),
}


@pytest.mark.parametrize("text", OTHERS)
def test_another_model(saved: Path, text: str) -> None:
    model = DropLM()
    OTHERS[text](model)
    refused(saved, text, Training(model))


def test_other_folders(tmp_path: Path) -> None:
    refused(tmp_path, f"{tmp_path} is not a checkpoint, and contains no complete one")
    refused(tmp_path / "nowhere", "nowhere is not a checkpoint, and is not there")
    untied = tl.Pipeline(DropLM(tied=False), microbatches=2, loss_fn=loss_fn)
    text = "embed.weight and head.weight are one weight in the model, and two in"
    refused(untied.save(tmp_path, torch.optim.AdamW(untied.parameters())), text)


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
    for given, text in [
        ({"optimizer": training.optimizer}, "the state of no optimizer, and optimizer 0"),
        ({"data": training.data}, r"was saved without data=…"),
        ({"scheduler": training.schedulers}, r"was saved without scheduler=…"),
    ]:
        with pytest.raises(CheckpointError, match=text):
            pipe.load(saved, **given)
    saved = pipe.save(tmp_path, scheduler=training.schedulers[:1])
    with pytest.raises(CheckpointError, match="the state of 1 scheduler, but you passed 2"):
        pipe.load(saved, scheduler=training.schedulers)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    pipe = pipeline(2, ranks=2)
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"extra": {"f": print}}, r"extra\.f is <built-in.*without pickle"),
        ({"optimizer": foreign}, "that is not in this model; make it with pipe"),
        ({"data": [1]}, "cannot save to .* 'list' object has no attribute 'state_dict'"),
        ({"scheduler": 0.1}, "'float' object has no attribute 'state_dict'"),
        ({"scaler": 2.0}, "'float' object has no attribute 'state_dict'"),
        ({"keep": 0}, "keep must be a whole number from 1 up"),
    ]
    for given, text in wrong:
        with pytest.raises(tl.TaktlineError, match=text):
            pipe.save(tmp_path, **given)
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
    same = all(map(torch.equal, training.state(), before))
    assert training.pipe.grad_norm() >= 0  # pyright: ignore
    return str(caught.value), same


def written(rank: int, group: Any, folder: str) -> None:
    training = Training(pipeline(2, mesh=mesh_of(group, None)))
    training.run(1)
    training.save(folder)


@pytest.mark.processes
def test_what_one_rank_finds_all_ranks_raise(workers: Workers, tmp_path: Path) -> None:
    workers.run(written, str(tmp_path))
    (save,) = tmp_path.glob("0*")
    for what, text in {
        "optimizer": "rank 1: ",
        "data": "ZeroDivisionError",
        "file": "rank-00001.safetensors is damaged",
    }.items():
        if what == "file":
            flip(save / "rank-00001.safetensors", -1)
        told = workers.run(one_rank, str(tmp_path), what)
        assert told[0] == told[1]
        assert text in told[0][0]
        assert told[0][1], "neither weights nor optimizers have changed"
