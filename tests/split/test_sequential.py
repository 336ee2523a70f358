"""Models that are chains of modules: by name, a stage has its own modules and runs them bare."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def names(pieces: tl.split.Pieces) -> list[list[str]]:
    return [[name for name, _ in piece.named_modules() if name] for piece in pieces]


class Doubled(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Twice(nn.Sequential):
    def __iter__(self) -> Any:
        return iter([*super().__iter__(), *super().__iter__()])


class Called(nn.Sequential):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().__call__(*args, **kwargs)


class Named(nn.Sequential):
    """A class of its own, with the forward of nn.Sequential."""


def test_a_stage_has_its_own_modules_alone() -> None:
    model = Named(OrderedDict(a=linear(), b=linear(), c=linear()))
    pieces = tl.split.by_names(model, ["b", "c"])
    assert names(pieces) == [["a"], ["b"], ["c"]]
    assert all(isinstance(piece, Named) for piece in pieces)
    assert pieces[1].get_submodule("b") is model.get_submodule("b")
    assert [name for name, _ in model.named_children()] == ["a", "b", "c"]


def test_chains_in_a_chain() -> None:
    inner = nn.Sequential(linear(), nn.Sequential(nn.ReLU(), linear()))
    model = nn.Sequential(linear(), inner, nn.Sequential(linear()), linear())
    pieces = tl.split.by_names(model, ["1.0", "1.1.1", "2.0", "3"])
    expected = [["0"], ["1", "1.0", "1.1", "1.1.0"], ["1", "1.1", "1.1.1"], ["2", "2.0"], ["3"]]
    assert names(pieces) == expected
    x = torch.randn(2, 4)
    assert torch.equal(pieces(x), model(x))


def hooked() -> nn.Module:
    model = nn.Sequential(linear(), linear())
    model.register_forward_pre_hook(lambda module, args: None)
    return model


def with_a_parameter() -> nn.Module:
    model = nn.Sequential(linear(), linear())
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: Doubled(linear(), linear()),
        lambda: Called(linear(), linear()),
        hooked,
        with_a_parameter,
        lambda: nn.Sequential(linear(), Doubled(linear(), linear())),
    ],
)
def test_what_may_do_more_is_not_sliced(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.randn(2, 4)
    cut = "1.1" if isinstance(model.get_submodule("1"), nn.Sequential) else "1"
    pieces = tl.split.by_names(model, [cut], example=(x,))
    assert "0" in names(pieces)[1]
    if not isinstance(model, Called):  # of which every piece is called
        assert torch.equal(pieces(x), model(x))


def test_an_order_of_its_own_is_not_sliced() -> None:
    model, x = Twice(linear(), linear()), torch.ones(2, 4)
    pieces = tl.split.by_names(model, ["1"], example=(x,))
    assert "0" in names(pieces)[1]
    assert torch.equal(pieces(x), model(x))


class Two(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        x = super().forward(input)
        return x, {"twice": 2 * x}


class Sum(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        return pair[0] + pair[1]["twice"]


def test_a_value_of_several_tensors_stays_one() -> None:
    model, x = nn.Sequential(Two(4, 4), Sum(), linear()), torch.randn(2, 4)
    pieces = tl.split.by_names(model, ["1", "2"])
    reference = copy.deepcopy(model)
    pieces(x).sum().backward()
    reference(x).sum().backward()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)  # pyright: ignore[reportArgumentType]


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1)


def test_a_value_that_is_changed_in_place() -> None:
    """Autograd refuses to change what a stage is given, directly or by a view of it."""
    model = nn.Sequential(linear(), View(), nn.ReLU(inplace=True))
    pieces, plain = tl.split.by_names(model, ["1"]), copy.deepcopy(model)
    for _ in range(3):
        x = torch.randn(2, 4)
        given = pieces[0](x).detach().requires_grad_()
        before = given.detach().clone()
        output = pieces[1](given)
        assert torch.equal(output, plain(x))
        assert torch.equal(given, before)
        output.sum().backward()
        assert torch.equal(given.grad, (before > 0).float())  # pyright: ignore[reportArgumentType]


def test_keywords_of_a_rank_are_for_its_first_stage() -> None:
    model, x = nn.Sequential(linear(), linear()), torch.randn(2, 4)
    pieces = tl.split.by_names(model, ["1"])
    assert torch.equal(pieces[1](pieces[0](input=x), input=x), model(x))


def test_a_shape_that_depends_on_values() -> None:
    class Selects(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)[input[:, 0] > 0]

    model, x = nn.Sequential(Selects(4, 4), linear()), torch.randn(8, 4)
    assert torch.equal(tl.split.by_names(model, ["1"], example=(x,))(x), model(x))
