"""Units that cannot run without data: their shapes are found with data that is made up."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import PartitionError

WIDTH, WORDS = 16, 32


class Experts(nn.Module):
    """Each row goes through one of its experts, as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        output = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).nonzero().flatten()
            output = output.index_add(0, rows, self.experts[expert](x[rows]))
        return x + output


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return 2 * x


def test_layers_that_look_at_their_data() -> None:
    torch.manual_seed(0)
    model, x = Mixture(), torch.randn(6, WIDTH)
    reference = copy.deepcopy(model)
    state = torch.get_rng_state()
    pieces = tl.split.by_names(model, ["layers.1", "layers.3"], example=(x,))
    for _ in range(2):
        pieces(x).square().sum().backward()
        reference(x).square().sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


class Sorted(Experts):
    """Splits its rows by how many of them go to each expert; one is found by its name."""

    def forward(self, x: Tensor) -> Tensor:
        chosen, order = self.router(x).argmax(-1).sort()
        counts = torch.nn.functional.one_hot(chosen, 3).sum(0).tolist()
        parts = zip(range(3), x[order].split(counts), strict=True)
        made = torch.cat([self.experts[number](part) for number, part in parts])
        busy = max(torch.tensor(counts)).eq(torch.tensor(counts)).nonzero()[0]
        named = self.experts.get_submodule(f"{busy[0]}")
        return x + torch.zeros_like(x).index_copy(0, order, made) + named(x)


def test_layers_that_count_their_rows() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Sorted() for _ in range(3)]), torch.randn(6, WIDTH)
    reference = copy.deepcopy(model)
    pieces = tl.split.by_names(model, ["1", "2"], example=(x,))
    for data in (x, x.flip(0) * 2):
        pieces(data).square().sum().backward()
        reference(data).square().sum().backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


class Checks(nn.Module):
    """Raises unless its mask has three rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if int(mask.sum()) != 3:
            raise ValueError("a mask of three rows")
        return self.linear(x)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.checks, self.last = nn.Linear(4, 4), Checks(), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.first(x)
        return self.last(self.checks(x, (x == x)[0, :3] if mask is None else mask))


def test_a_unit_that_looks_at_an_argument() -> None:
    model, x, mask = Masked(), torch.randn(2, 4), torch.ones(3, dtype=torch.int64)
    pieces = tl.split.by_names(model, ["last"], example=(x, mask))
    assert torch.equal(pieces(x, mask), model(x, mask))


def test_a_unit_that_raises_without_data() -> None:
    model, x, mask = Masked(), torch.randn(2, 4), None
    with pytest.raises(PartitionError, match="run without data to be cut: ValueError: a mask"):
        tl.Pipeline(model, example=(x, mask), cuts=["last"], ranks=2, microbatches=2)


class Shortens(nn.Module):
    """Drops columns, as many as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        return x[:, : 1 + int((x.sum(-1) > 0).sum(1).max())]


def test_a_layer_whose_size_depends_on_data_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Shortens(), nn.Linear(4, 4)), torch.randn(3, 5, 4)
    with pytest.raises(PartitionError, match=r"'1' .* tensors of other sizes, with other data"):
        tl.split.by_names(model, ["2"], example=(x,))
