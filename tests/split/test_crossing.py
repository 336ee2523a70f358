"""What a later stage uses of what earlier ones have made, it gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import taktline as tl
from tests.split.models import UNet
from tests.split.test_idioms import X, require_same
from tests.split.training import require_plain_training

WIDTH = 4


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))


class Conditioned(Base):
    """As in a DiT: layers take of a vector what the forward cuts out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.label = nn.Linear(1, 2 * WIDTH), nn.Embedding(5, 2 * WIDTH)

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        condition = self.time(time[:, None]) + self.label(label)
        x = self.embed(x)
        for layer in self.layers:
            shift, scale = F.silu(condition).chunk(2, 1)
            x = x + layer(x) * scale + shift
        return x


class Written(Base):
    """A layer gets what was changed in place before."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x += 1
        first = self.layers[0](x)
        x = x + self.layers[1](first)
        return self.layers[3](x + self.layers[2](first))


def unet() -> nn.Module:
    torch.manual_seed(0)
    return UNet()


LAYERS = ["layers.1", "layers.2"]
CONDITIONS = (X, torch.tensor([0.1, 0.7]), torch.tensor([0, 3]))


@pytest.mark.parametrize(
    ("make", "cuts", "args"),
    [
        (Conditioned, LAYERS, CONDITIONS),
        (Written, LAYERS, (X,)),
        (unet, ["middle", "up.1"], (torch.ones(1, 3, 8, 8),)),
        (unet, ["down.1", "middle", "up.0"], (torch.ones(1, 3, 8, 8),)),
    ],
)
def test_values_cross_with_their_gradients(make: Any, cuts: list[str], args: Any) -> None:
    require_same(make, *args, cuts=cuts)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_they_are_found_by_a_pipeline(schedule: str) -> None:
    args = tuple(part.repeat_interleave(4, 0) for part in CONDITIONS)
    target, options = torch.ones(8, WIDTH), {"schedule": schedule, "ranks": 2}
    require_plain_training(Conditioned, args, target, microbatches=4, **options)


def test_no_more_crosses_than_is_used() -> None:
    pieces = tl.split.by_names(Written(), LAYERS, example=(X,))
    values, *_ = pieces[0](X)
    assert len(values) == 2  # what layers.1 takes, and x
    values, *call = pieces[1](values, *pieces[0](X)[1:])
    assert len(values) == 2  # what layers.2 takes, and what is added in the end
    assert pieces[2](values, *call).shape == X.shape


def test_boundaries_list_what_crosses() -> None:
    pipe = tl.Pipeline(Written(), example=(X,), microbatches=2, ranks=3, cuts=LAYERS)
    assert all(row.shape == (2, WIDTH) for row in pipe.boundaries[1])
    assert pipe.boundaries[1][0].what == "layers.0 (its output)"
    text = str(pipe.boundaries).splitlines()
    assert text[0].split() == ["from", "to", "what", "type", "shape", "bytes"]
