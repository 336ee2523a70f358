"""Manifests of checkpoints that were edited: a load that is refused has changed nothing."""

from __future__ import annotations

import copy
import json
import random as python
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from torch import nn

import taktline as tl
from taktline.checkpoint.files import MANIFEST, sealed
from taktline.errors import TaktlineError
from tests.fuzz.mutate import a_place, a_value

_DEEP = ("values", "optimizers", "tensors")
"""The parts with most of what a load uses."""


class _Data:
    """A position in the data."""

    next: Any = 3

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = int(state["next"])


class _Run:
    """All that a load may change."""

    def __init__(self) -> None:
        layers = [nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1)]
        loss_fn = nn.functional.mse_loss
        self.pipe = tl.Pipeline(
            nn.Sequential(*layers), cuts=["2"], microbatches=2, loss_fn=loss_fn, ranks=2
        )
        weights = [each for each in self.pipe.parameters() if each.dim() > 1]
        others = [each for each in self.pipe.parameters() if each.dim() < 2]
        self.optimizers = [torch.optim.AdamW(weights), torch.optim.SGD(others, momentum=0.9)]
        self.others: dict[str, Any] = {
            "scheduler": [
                torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.9),
                torch.optim.lr_scheduler.SequentialLR(
                    self.optimizers[1],
                    [
                        torch.optim.lr_scheduler.ConstantLR(self.optimizers[1]),
                        torch.optim.lr_scheduler.ExponentialLR(self.optimizers[1], 0.9),
                    ],
                    [3],
                ),
            ],
            "scaler": torch.amp.GradScaler("cpu", init_scale=4.0),
            "data": _Data(),
        }
        self.others["scaler"].scale(torch.ones(()))
        for _ in range(2):
            self.pipe.step(torch.rand(8, 2), target=torch.rand(8, 1))
            for each in (*self.optimizers, *self.others["scheduler"]):
                each.step()

    def load(self, folder: Path) -> None:
        self.pipe.load(folder, self.optimizers, **self.others)

    def state(self) -> Any:
        schedule = self.pipe.schedules[0]
        objects = [*self.optimizers, *self.others["scheduler"]]
        objects += [self.others["scaler"], self.others["data"]]
        generators = python.getstate(), np.random.get_state(), torch.get_rng_state()
        states = [each.state_dict() for each in objects]
        return copy.deepcopy((self.pipe.state_dict(), states, generators, schedule.steps))


@cache
def _saved() -> tuple[Path, Any]:
    """A save, and the content of its manifest."""
    run = _Run()
    folder = run.pipe.save(mkdtemp(), run.optimizers, extra={"a": (1, None)}, **run.others)
    return folder, json.loads((folder / MANIFEST).read_text())["content"]


_current: list[_Run] = []
"""The run that is loaded into, until a load succeeds."""


def draw(random: Random) -> str:
    """A manifest with the right checksum, edited in one place or two."""
    content = copy.deepcopy(_saved()[1])
    for _ in range(random.choice([1, 1, 2])):
        place, key = _a_place(random, content)
        other = _a_place(random, content)
        match random.randrange(5):
            case 0:
                del place[key]
            case 1 if isinstance(place[key], int):
                place[key] += random.choice([-1, 1, -(2**40), 2**40])
            case 2:
                place[key] = copy.deepcopy(other[0][other[1]])
            case 3 if isinstance(place, list):
                place.insert(key, copy.deepcopy(place[key]))
            case _:
                place[key] = a_value(random)
    return sealed(content)


def _a_place(random: Random, content: Any) -> tuple[Any, Any]:
    """Some list or dict in a manifest, and a key of it; most are deep inside."""
    part = random.choice(_DEEP if random.random() < 0.9 else list(content))
    place, key = a_place(random, content.setdefault(part, None), deeper=0.85)
    return (content, part) if place is None else (place, key)


def try_(input: str) -> None:
    """Load it: what is refused leaves everything as it was."""
    folder, _ = _saved()
    (folder / MANIFEST).write_text(input)
    if not _current:
        _current.append(_Run())
    run = _current[0]
    before = run.state()
    try:
        run.load(folder)
    except TaktlineError:
        assert_same(run.state(), before)
        raise
    except BaseException:
        _current.clear()
        raise
    _current.clear()


def assert_same(found: Any, expected: Any) -> None:
    """Raise unless two states are the same; tensors to the last bit."""
    assert type(found) is type(expected), (found, expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for each, other in zip(found, expected, strict=True):
            assert_same(each, other)
    elif isinstance(found, (torch.Tensor, np.ndarray)):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected
