"""Manifests of checkpoints that were edited: a load that is refused has changed no weight."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import torch
from torch import nn

import taktline as tl
from taktline.checkpoint.files import MANIFEST, sealed
from taktline.errors import TaktlineError
from tests.fuzz.mutate import a_value

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
    """A model, and all that is loaded beside it."""

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

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.pipe.state_dict().items()}


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
    place, key = content, random.choice(_DEEP if random.random() < 0.9 else list(content))
    while isinstance(place.get(key) if isinstance(place, dict) else place[key], (dict, list)):
        inner = place[key]
        if not inner or random.random() < 0.15:
            break
        place, key = (
            inner,
            random.choice([*(inner if isinstance(inner, dict) else range(len(inner)))]),
        )
    if isinstance(place, dict) and key not in place:
        place[key] = None
    return place, key


def try_(input: str) -> None:
    """Load it: what is refused leaves the weights and the number of steps as they were."""
    folder, _ = _saved()
    (folder / MANIFEST).write_text(input)
    if not _current:
        _current.append(_Run())
    run = _current[0]
    before, steps = run.state(), run.pipe.schedules[0].steps
    try:
        run.load(folder)
    except TaktlineError:
        assert run.pipe.schedules[0].steps == steps
        torch.testing.assert_close(run.state(), before, rtol=0, atol=0)
        raise
    except BaseException:
        _current.clear()
        raise
    _current.clear()
