"""Calls of a stage that look like an earlier one: as exact as the first."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import taktline as tl
from tests.split import forwards
from tests.split.forwards import (
    MODELS,
    SAME,
    WIDTH,
    Batches,
    Branches,
    Chain,
    Conditions,
    Draws,
    DrawsInPython,
    Dropped,
    Global,
    Helpers,
    Masks,
    Offset,
    Positions,
    Residual,
    Shapes,
    Tied,
    mirrored,
    same_as_cold,
    split,
    step,
)


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_a_later_call_does_what_a_first_one_does(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    random.seed(0)
    pieces = split(make())
    for size in (3, 2, 3):
        same_as_cold(pieces, torch.randn(size, WIDTH))


@pytest.mark.slow
@pytest.mark.parametrize("make", [make for make in MODELS if make not in (Draws, DrawsInPython)])
def test_a_later_call_does_what_the_model_does(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    if isinstance(model, (Batches, Positions, Dropped)):
        model.eval()
    plain = copy.deepcopy(model)
    pieces = split(model)
    for size in (3, 2, 3):
        x = torch.randn(size, WIDTH)
        found, _ = step(pieces, x)
        plain.zero_grad()
        wanted, _ = step(tl.split.by_hand([plain]), x)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        if isinstance(model, (Tied, Offset, Masks)):
            continue  # gradients that are summed up over stages, in another order
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0, msg=name)


def toggle_flag(piece: Any) -> None:
    piece.flag = not piece.flag


def scale(piece: Any) -> None:
    piece.scale += 1.0


def toggle_global(piece: Any) -> None:
    forwards.FLAG = not forwards.FLAG


def exchange_function(piece: Any) -> None:
    forwards.same = SAME if forwards.same is mirrored else mirrored


def change_factor(piece: Any) -> None:
    forwards.FACTOR += 1.0


ONCE = (toggle_global, exchange_function, change_factor)


def evaluate(piece: Any) -> None:
    piece.drop.eval()


def evaluate_all(piece: Any) -> None:
    piece.eval()


def hook(piece: Any) -> None:
    for layer in piece.layers:
        layer.register_forward_hook(lambda module, args, output: output * 3)


def wrap(piece: Any) -> None:
    for name, layer in list(piece.layers.named_children()):
        if any(True for _ in layer.parameters()):
            piece.layers[int(name)] = nn.Sequential(layer, nn.Tanh())


def double(piece: Any) -> None:
    piece.double()


CHANGES: list[tuple[Callable[[], nn.Module], Callable[[Any], None]]] = [
    (Branches, toggle_flag), (Branches, scale), (Residual, scale), (Masks, scale),
    (Global, toggle_global), (Positions, scale), (Positions, evaluate), (Dropped, evaluate),
    (Conditions, toggle_flag), (Conditions, evaluate_all), (Chain, hook), (Chain, wrap),
    (Chain, double), (Helpers, exchange_function), (Helpers, change_factor),
    (Positions, wrap), (Residual, double), (Shapes, toggle_flag), (Shapes, scale),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("make", "change"), CHANGES)
def test_what_changes_between_calls_is_noticed(
    make: Callable[[], nn.Module], change: Callable[[Any], None]
) -> None:
    torch.manual_seed(0)
    pieces = split(make())
    x = torch.randn(3, WIDTH)
    for _ in range(2):
        for _ in range(2):
            same_as_cold(pieces, x)
        for piece in pieces:
            change(piece)
            if change in ONCE:
                break
        x = x.to(next(pieces[0].parameters()).dtype)
    same_as_cold(pieces, x)


class Late(Chain):
    """A condition on data that only counts once an attribute is another."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) if self.flag or x[0, 0] > 0 else self.norm(self.norm(x))


def test_a_condition_on_data_that_an_attribute_brings() -> None:
    torch.manual_seed(0)
    pieces = tl.split.by_names(Late(), ["layers.5"], example=(torch.zeros(3, WIDTH),))
    for turn in range(4):
        for sign in (1, -1, 1):
            same_as_cold(pieces, sign * torch.full((3, WIDTH), 9.0))
        if turn % 2 == 0:
            toggle_flag(pieces[1])


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.linear(x) * weights


class Broadcast(nn.Module):
    """One function returns what a stage receives, and what every stage computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Weighted() for _ in range(3))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        weights, x = torch.broadcast_tensors(weights, self.embed(x))
        for layer in self.layers:
            x = layer(x, weights)
        return x


def test_a_function_that_computes_besides_what_was_received() -> None:
    torch.manual_seed(0)
    model = Broadcast()
    batches = [(torch.randn(2, WIDTH), torch.randn(3, 2, 1)) for _ in range(3)]
    pieces = tl.split.by_names(model, ["layers.0", "layers.1"], example=batches[0])
    for batch in batches:
        # Within rounding: what was expanded is received contiguous, for which there are other
        # kernels, and on a CPU without AVX they round otherwise.
        torch.testing.assert_close(pieces(*batch), model(*batch))


class WritesThroughView(nn.Module):
    """A unit gets a view of a tensor that the forward changes in a later stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        whole = self.layers[0](x) * 1
        view = whole[:]
        x = self.layers[2](self.layers[1](view))
        whole.add_(1)
        return self.layers[3](x + view)


@pytest.mark.parametrize("cut", ["layers.1", "layers.2", "layers.3"])
def test_a_view_of_a_tensor_that_changes_in_a_later_stage(cut: str) -> None:
    torch.manual_seed(0)
    model = WritesThroughView()
    batches = [torch.randn(2, WIDTH) for _ in range(3)]
    pieces = tl.split.by_names(model, [cut], example=(batches[0],))
    with torch.no_grad():
        for batch in batches:
            torch.testing.assert_close(pieces(batch), model(batch), rtol=0, atol=0)


class WritesArguments(nn.Module):
    """The forward itself changes its arguments, in all stages and in the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, shift: Tensor, last: Tensor) -> Tensor:
        x /= 2
        shift += 1
        y = self.layers[0](x) + shift
        y = self.layers[2](self.layers[1](y) + shift)
        last *= 3
        return y * last


def test_a_forward_that_changes_its_arguments() -> None:
    torch.manual_seed(0)
    model = WritesArguments()

    def draw(rows: int) -> list[Tensor]:
        return [torch.randn(rows, WIDTH), torch.randn(rows, 2 * WIDTH)[:, ::2], torch.randn(1)]

    example = draw(2)
    kept = copy.deepcopy(example)
    pieces = tl.split.by_names(model, ["layers.1", "layers.2"], example=tuple(example))
    torch.testing.assert_close(example, kept, rtol=0, atol=0)
    for rows in (2, 2, 3, 2):
        batch = draw(rows)
        output = pieces(*copy.deepcopy(batch))
        torch.testing.assert_close(output, model(*batch), rtol=0, atol=0)


def test_another_mode_is_another_kind() -> None:
    torch.manual_seed(0)
    model = Chain()
    pieces, plain = split(model), copy.deepcopy(model)
    x = torch.randn(3, WIDTH)
    for _ in range(2):
        assert torch.equal(pieces(x), plain(x))
        with torch.no_grad():
            assert torch.equal(pieces(x), plain(x))
        with torch.inference_mode():
            assert torch.equal(pieces(x), plain(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(pieces(x), plain(x))
        y = x.t().contiguous().t()
        assert torch.equal(pieces(y), plain(y))


@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_what_another_stage_has(late: bool) -> None:
    pieces, x = split(Chain()), torch.randn(3, WIDTH)
    called: list[object] = []
    given = pieces[0](x)
    for _ in range(2 if late else 0):
        pieces[1](*given)
    embed = pieces[1].get_submodule("embed")
    embed.register_forward_hook(lambda module, args, output: called.append(output))
    embed.register_forward_pre_hook(lambda module, args: called.append(args))
    for count in (2, 4):
        pieces[1](*given)
        assert len(called) == count


@pytest.mark.parametrize("rows", [3, 5])
def test_inference_comes_first(rows: int) -> None:
    """Also with another shape than that of the example."""
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(rows, WIDTH)
    pieces = split(model)
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(pieces(x), model(x))
    with torch.no_grad():
        assert torch.equal(pieces(x), model(x))


class Leaks(Chain):
    """Hands on a value of the stage before, under a condition, that has not come with the rest."""

    def forward(self, x: Tensor) -> Any:
        early = x = self.embed(x)
        for place, layer in enumerate(self.layers, 1):
            x = layer(x)
            if place == self.count:
                x = early
        return self.norm(x)


def test_a_value_that_was_not_received_is_refused() -> None:
    pieces, x = split(Leaks()), torch.randn(3, WIDTH)
    piece: Any = pieces[2]
    given = pieces[1](*pieces[0](x))
    piece(*given)
    piece.count = 5
    with pytest.raises(tl.errors.PartitionError, match=r"'embed', which is not in the input"):
        piece(*given)


def test_tensors_without_data_are_another_kind() -> None:
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(3, WIDTH)
    pieces = split(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for _ in range(2):
        with mode:
            assert pieces(mode.from_tensor(x)).shape == (3, WIDTH)
        assert torch.equal(pieces(x), model(x))
