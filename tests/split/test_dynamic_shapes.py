"""Shapes that depend on data, before the last stage: later stages get them with the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import taktline as tl
from taktline.errors import PartitionError
from tests.workers import Workers

WIDTH, ROWS, PARTS = 4, 16, 4


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Padding(Base):
    """A mask that the model is given."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.run(self.embed(x)[mask])


class Pruned(Base):
    """Fewer rows after each layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x[x[:, 0] > x[:, 0].mean() - 0.3]))
        return x


class Experts(nn.Module):
    """Experts that are units; one that gets no rows is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen, out = weights.argmax(-1), 0 * x
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        for layer in self.layers:
            out = torch.tanh(layer(out))
        return out


class Distinct(Base):
    """How many numbers are different, and which."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](self.embed(x)))
        found = torch.unique((x[:, 0] * 2).round().int()).float()
        return self.layers[3](self.layers[2](x) + found.sum())


class Repeated(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.run(x.repeat_interleave((x[:, 0] > 0).int() + 1, 0))


class Late(Base):
    """An index of the first stage is used by the last one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        return self.run(x)[rows].sum(0) + x[rows].sum(0)


class Drop(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        return x[x.sum(1) > 0]


class Dropping(Base):
    """Layers drop rows by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0], self.layers[2] = Drop(WIDTH, WIDTH), Drop(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.embed(x))


MODELS = [Padding, Pruned, Experts, Distinct, Repeated, Late, Dropping]
CUTS = ["layers.1", "layers.2", "layers.3"]


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind()


def batch(step: int, kind: type[nn.Module]) -> tuple[Tensor, ...]:
    torch.manual_seed(step)
    x = torch.randn(ROWS, WIDTH)
    return (x, torch.rand(ROWS) > 0.4) if kind is Padding else (x,)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return output.square().sum() * target.mean()


def expected(kind: type[nn.Module]) -> dict[str, Tensor]:
    model, size = made(kind), ROWS // PARTS
    for step in range(3):
        for at in range(0, ROWS, size):
            args = (part[at : at + size] for part in batch(step, kind))
            (loss_fn(model(*args), torch.ones(size)) / PARTS).backward()
    return gradients(model.named_parameters())


def gradients(named: Any) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}


def trained(kind: type[nn.Module], **options: Any) -> dict[str, Tensor]:
    """The gradients of three steps, whose shapes differ."""
    example = tuple(torch.zeros_like(part[: ROWS // PARTS]) for part in batch(0, kind))
    with tl.Pipeline(
        made(kind), example=example, loss_fn=loss_fn, microbatches=PARTS, **options
    ) as pipe:
        for step in range(3):
            pipe.step(*batch(step, kind), target=torch.ones(ROWS))
        return gradients(pipe.named_parameters())


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("zbv", 2)])
def test_gradients_are_those_of_the_model(kind: type[nn.Module], schedule: str, ranks: int) -> None:
    found = trained(kind, schedule=schedule, ranks=ranks, cuts=CUTS)
    torch.testing.assert_close(found, expected(kind))


def test_a_pipeline_cuts_there() -> None:
    torch.testing.assert_close(trained(Pruned, ranks=3), expected(Pruned))


def train(rank: int, group: dist.ProcessGroup, kind: type[nn.Module]) -> dict[str, Tensor]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    return trained(kind, schedule="zbv", mesh=mesh, cuts=CUTS)


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Pruned, Dropping])
def test_over_processes(workers: Workers, kind: type[nn.Module]) -> None:
    right = expected(kind)
    for found in workers.run(train, kind):
        torch.testing.assert_close(found, {name: right[name] for name in found})


class Random(Base):
    """The size is drawn, which each stage would do for itself."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.rand(8).gt(0.5).nonzero()[:, 0]
        x = self.embed(x)
        return self.run(x[x[:, 0] > 0] + len(rows))


def test_a_size_that_is_drawn_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"test_dynamic_shapes.py:\d+: __len__ needs the data"):
        tl.split.by_names(made(Random), CUTS, example=(torch.zeros(4, WIDTH),))
