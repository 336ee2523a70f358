"""What a later stage uses of what earlier ones have made, it gets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import taktline as tl
from tests.split.models import UNet
from tests.split.training import require_plain_training

WIDTH = 4


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))


class All(Base):
    """What every layer returns is used at the end."""

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            found.append(x)
        return torch.stack(found).mean(0)


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


class Keywords(nn.Module):
    """Layers give and take several values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, (hidden, cell) = self.first(x)
        for layer in self.layers:
            x = layer(x) + hidden[0]
        return {"x": x, "cell": cell}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


X = numbers(3, WIDTH)
CONDITIONS = (X, torch.rand(3), torch.tensor([0, 3, 1]))
CASES: list[tuple[type[nn.Module], list[str], tuple[Any, ...]]] = [
    (All, ["layers.1", "layers.2", "layers.3"], (X,)),
    (Conditioned, ["layers.1", "layers.2"], CONDITIONS),
    (Written, ["layers.1", "layers.2"], (X,)),
    (Keywords, ["layers.1", "layers.2"], (X,)),
    (UNet, ["middle", "up.1"], (numbers(1, 3, 8, 8),)),
    (UNet, ["down.1", "middle", "up.0"], (numbers(1, 3, 8, 8),)),
]


def total(output: Any) -> Tensor:
    leaves = pytree.tree_leaves(output)
    return torch.stack([leaf.square().sum() for leaf in leaves]).sum()


@pytest.mark.parametrize(("kind", "cuts", "args"), CASES)
def test_values_cross_with_their_gradients(
    kind: type[nn.Module], cuts: list[str], args: tuple[Any, ...]
) -> None:
    torch.manual_seed(0)
    model = kind()
    reference = copy.deepcopy(model)
    pieces = tl.split.by_names(model, cuts, example=args)
    for number in range(3):  # the later ones go quicker
        torch.manual_seed(number)
        found = total(pieces(*args))
        torch.manual_seed(number)
        expected = total(reference(*args))
        torch.testing.assert_close(found, expected)
        found.backward()
        expected.backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("kind", [All, Conditioned])
def test_they_are_found_by_a_pipeline(kind: type[nn.Module], schedule: str) -> None:
    args = tuple(
        part.repeat_interleave(4, 0) for part in (CONDITIONS if kind is Conditioned else (X,))
    )
    target = numbers(12, WIDTH)
    require_plain_training(kind, args, target, schedule=schedule, microbatches=4, ranks=2)


def test_no_more_crosses_than_is_used() -> None:
    pieces = tl.split.by_names(Written(), ["layers.1", "layers.2"], example=(X,))
    values, *_ = pieces[0](X)
    assert len(values) == 2  # what layers.1 takes, and x
    values, *call = pieces[1](values, *pieces[0](X)[1:])
    assert len(values) == 2  # what layers.2 takes, and what is added in the end
    assert pieces[2](values, *call).shape == X.shape


def test_boundaries_list_what_crosses() -> None:
    pipe = tl.Pipeline(
        Written(), example=(X,), microbatches=2, ranks=3, cuts=["layers.1", "layers.2"]
    )
    assert all(row.shape == (3, WIDTH) for row in pipe.boundaries[1])
    assert pipe.boundaries[1][0].what == "layers.0 (its output)"
    text = str(pipe.boundaries).splitlines()
    assert text[0].split() == ["from", "to", "what", "type", "shape", "bytes"]
