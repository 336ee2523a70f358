"""Numbers that a forward asks tensors for, and what depends on them, in every stage."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import taktline as tl
from taktline.errors import PartitionError
from tests.split.training import made
from tests.workers import Workers

WIDTH = 4


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))


class Branches(Base):
    """Layers of one of two rows run, and what they have made is used later."""

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        for layer, other in zip(self.layers, self.others, strict=True):
            x = layer(x)
            if x.sum() > 0:
                x = torch.tanh(other(x))
                found.append(x)
        return x + torch.stack(found).sum(0) if found else x


class Scales(Base):
    """Numbers of all kinds."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        largest, count, any_, (first, _) = (
            x.abs().max().item(),
            int((x > 0).sum()),
            bool((x > 1).any()),
            x[0, :2].tolist(),
        )
        assert isinstance(largest, float)
        assert isinstance(first, float)
        for layer in self.layers[1:]:
            x = layer(x / largest) + first * (count if any_ else -1)
        return x / float(x.detach().norm())


class Loops(Base):
    """How often a layer runs depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for _ in range(int((x > 0).sum()) % 3):
            x = x + self.others[0](x)
        return self.layers[2](self.layers[1](x))


class Early(Base):
    """Asked for in a later stage, of what an earlier one has made."""

    def forward(self, x: Tensor) -> Tensor:
        early = self.layers[0](x)
        x = self.layers[2](self.layers[1](2 * early))
        if early.mean() > 0:
            x = -x
        return self.layers[3](x)


class Counting(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        x = super().forward(input)
        return x, (x > 0).sum().item(), 3


class Returned(nn.Module):
    """Submodules return numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        total = 0
        for layer in self.layers:
            x, number, three = layer(x * (1 + total))
            total += number * three
        return x * total


class Drawn(Base):
    """A number that every stage could draw, but each another one."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if torch.rand(()).item() > 0.5 and x.sum() > -100:
                x = -x
        return x


CASES: list[tuple[type[nn.Module], list[str]]] = [
    (Branches, ["layers.1", "layers.2", "layers.3"]),
    (Scales, ["layers.1", "layers.3"]),
    (Loops, ["layers.1", "layers.2"]),
    (Early, ["layers.1", "layers.3"]),
    (Early, ["layers.2"]),
    (Returned, ["layers.1", "layers.2"]),
]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, WIDTH) for _ in range(8)]


@pytest.mark.parametrize(("kind", "cuts"), CASES)
def test_every_stage_does_what_the_model_does(kind: type[nn.Module], cuts: list[str]) -> None:
    model = made(kind)
    plain = copy.deepcopy(model)
    pieces = tl.split.by_names(model, cuts, example=(torch.zeros(2, WIDTH),))
    for x in batches():
        model.zero_grad()
        plain.zero_grad()
        expected, output = plain(x), pieces(x)
        assert torch.equal(output, expected)
        expected.sum().backward()
        output.sum().backward()
        torch.testing.assert_close(gradients(model), gradients(plain))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Branches, Scales, Early, Returned])
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("1f1b", 3)])
def test_a_pipeline_cuts_there(kind: type[nn.Module], schedule: str, ranks: int) -> None:
    model = made(kind)
    plain = copy.deepcopy(model)
    for x in batches():
        (loss_fn(plain(x), torch.ones(2, WIDTH)) / 8).backward()
    with tl.Pipeline(
        model,
        example=(torch.zeros(2, WIDTH),),
        schedule=schedule,
        ranks=ranks,
        microbatches=8,
        loss_fn=loss_fn,
    ) as pipe:
        pipe.step(torch.cat(batches()), target=torch.ones(16, WIDTH))
    torch.testing.assert_close(gradients(model), gradients(plain))


def train(rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    with tl.Pipeline(
        made(Branches),
        example=(torch.zeros(2, WIDTH),),
        microbatches=8,
        mesh=mesh,
        loss_fn=loss_fn,
    ) as pipe:
        pipe.step(torch.cat(batches()), target=torch.ones(16, WIDTH))
        return {
            n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in pipe.named_parameters()
        }


@pytest.mark.processes
def test_over_processes(workers: Workers) -> None:
    plain = made(Branches)
    for x in batches():
        (loss_fn(plain(x), torch.ones(2, WIDTH)) / 8).backward()
    expected = gradients(plain)
    for found in workers.run(train):
        torch.testing.assert_close(found, {name: expected[name] for name in found})


def test_what_is_drawn_is_drawn_once() -> None:
    """Each stage draws by itself, but takes what earlier ones have drawn."""
    model = made(Drawn)
    pieces = tl.split.by_names(model, ["layers.2"], example=(torch.zeros(2, WIDTH),))
    for x in batches():
        weights = [torch.eye(WIDTH)] * 4
        for layer, weight in zip(model.layers, weights, strict=True):  # pyright: ignore[reportArgumentType]
            layer.weight.data.copy_(weight)
            layer.bias.data.zero_()
        output = pieces(x)
        assert torch.equal(output.abs(), x.abs())


class Unsteady(Base):
    """Asks for another number in every other call."""

    calls: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        self.calls.append(1)
        for _ in range(1 + len(self.calls) % 2):
            x = x * (1 if x.sum() > 0 else 2)
        return self.layers[1](x)


def test_stages_that_read_other_numbers_are_refused() -> None:
    pieces = tl.split.by_names(made(Unsteady), ["layers.1"], example=(torch.zeros(2, WIDTH),))
    with pytest.raises(PartitionError, match=r"reads . numbers .* stage 1 begins, but . in"):
        pieces(batches()[0])


def test_boundaries_list_them() -> None:
    with tl.Pipeline(
        made(Scales), example=(torch.zeros(2, WIDTH),), ranks=2, microbatches=2, cuts=["layers.1"]
    ) as pipe:
        assert [crossing.what for crossing in pipe.boundaries[0]][:2] == [
            "layers.1 (an argument)",
            "numbers that the forward reads",
        ]
        assert pipe.boundaries[0][1].shape == (1 + 5,)  # and how many there are


class Grows(Base):
    """Asks for more numbers the larger they are."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        left = x.detach().abs().sum()
        while left > 1:
            left = left - 1
        return self.layers[1](x)


def test_more_numbers_than_there_is_room_for() -> None:
    pieces = tl.split.by_names(made(Grows), ["layers.1"], example=(torch.zeros(2, WIDTH),))
    with pytest.raises(
        PartitionError, match=r"reads \d+ numbers .* only 257 with the example; every"
    ):
        pieces(torch.full((2, WIDTH), 1e3))
