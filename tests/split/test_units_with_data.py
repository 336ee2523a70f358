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
    """Splits its rows by how many of them go to each expert."""

    def forward(self, x: Tensor) -> Tensor:
        chosen, order = self.router(x).argmax(-1).sort()
        counts = torch.nn.functional.one_hot(chosen, 3).sum(0).tolist()
        parts = zip(self.experts, x[order].split(counts), strict=True)
        made = torch.cat([expert(part) for expert, part in parts])
        return x + torch.zeros_like(x).index_copy(0, order, made)


def test_a_unit_that_cannot_run_on_numbers_that_are_made_up() -> None:
    model, x = nn.Sequential(*[Sorted() for _ in range(3)]), torch.randn(6, WIDTH)
    message = r"'0' reads numbers that depend on data, and cannot run where they are all 0: .*split"
    with pytest.raises(PartitionError, match=message):
        tl.split.by_names(model, ["1", "2"], example=(x,))


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
