"""Layers that a forward calls several times: a stage can begin with any of the calls."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import PartitionError
from tests.split.training import gradients, made

WIDTH, TIMES = 4, 6


class Block(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(self.norm(x)))


class Universal(nn.Module):
    """One layer, used many times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Linear(WIDTH, WIDTH), Block()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(TIMES):
            x = self.block(x)
        return self.head(x)


class Skipping(Universal):
    """What an earlier call has returned is used later, and so is the layer inside of another."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.embed(x)
        for time in range(TIMES):
            x = self.block(x)
            if time == 2:
                first = x * 2
        return self.head(self.block.linear(x + first))


class Siamese(nn.Module):
    """One tower of layers for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.tower(left) * self.tower(right)


def numbers(rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [
        (Universal, ["block@3"]),
        (Universal, ["block", "block@2", "block@5", "head"]),
        (Universal, ["block@1", "block@5"]),
        (Universal, ["block.linear@1", "block.norm@4"]),
        (Skipping, ["block@1", "block@4"]),
        (Skipping, ["block@2", "block@3", "head"]),
    ],
)
def test_a_stage_begins_with_one_of_several_calls(
    kind: type[nn.Module], cuts: Sequence[str]
) -> None:
    model, x = made(kind), numbers()
    plain = copy.deepcopy(model)
    pieces = tl.split.by_names(model, cuts, example=(x,))
    assert pieces.ties
    for _ in range(3):  # with and without what the first call has shown
        plain.zero_grad()
        model.zero_grad()
        expected, output = plain(x), pieces(x)
        assert torch.equal(output, expected)
        expected.square().sum().backward()
        output.square().sum().backward()
        torch.testing.assert_close(gradients(model), gradients(plain))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "inputs"), [(Universal, 1), (Skipping, 1), (Siamese, 2)])
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("zbv", 2)])
def test_a_pipeline_finds_them(
    kind: type[nn.Module], inputs: int, schedule: str, ranks: int
) -> None:
    model = made(kind)
    plain, batch = copy.deepcopy(model), [numbers(8)] * inputs
    target = torch.ones(1)
    loss_fn(plain(*batch), target).backward()
    example = tuple(part[:2] for part in batch)
    options: dict[str, Any] = {"schedule": schedule, "ranks": ranks, "microbatches": 4}
    with tl.Pipeline(model, example=example, loss_fn=loss_fn, **options) as pipe:
        pipe.step(*batch, target=target.expand(8, 1))
        found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
        assert pipe.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(found, gradients(plain))


def test_what_is_called_often_is_there_once() -> None:
    pieces = tl.split.auto(made(Universal), 2, (numbers(),))
    assert str(pieces).splitlines()[2].split()[-1] == "208"
    text = "Pieces(2 stages: 48, 38 parameters; tied: block.norm.weight of stage 0 = "
    assert repr(pieces).startswith(text)
    assert repr(pieces).endswith(", …)")


class Recurrent(nn.Module):
    """A cell that goes through time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(100):
            x = torch.tanh(self.cell(x))
        return self.head(x)


def test_time_is_not_cut_by_itself() -> None:
    pieces = tl.split.auto(made(Recurrent), 2, (numbers(),))
    assert [len(list(piece.parameters())) for piece in pieces] == [2, 2]


def test_an_example_is_needed() -> None:
    with pytest.raises(PartitionError, match=r"'block@2' is one of several calls of 'block'; pass"):
        tl.split.by_names(made(Universal), ["block@2"])
