"""What layers leave behind beside their outputs: in attributes, and in what they are given."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import PartitionError
from tests.split.training import require_plain_training

WIDTH, PARTS = 4, 4

FOUND: list[Tensor] = []


class Layer(nn.Linear):
    """Has a loss of its own, which it keeps, or puts where it is told to."""

    own: Any = 0.0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, input: Tensor, into: Any = None) -> Tensor:
        x = torch.tanh(super().forward(input))
        self.own = x.square().mean()
        return self.leave(x, into)

    def leave(self, x: Tensor, into: Any) -> Tensor:
        """Leave something behind."""
        return x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Putting(Layer):
    def leave(self, x: Tensor, into: Any) -> Tensor:
        if isinstance(into, dict):
            into["last"] = x
            into["sums"].append(x.sum())
            into["count"] = into.get("count", 0) + 1
        else:
            into.append(self.own)
        return x


class Reading(Layer):
    """Uses what another layer has put there."""

    def leave(self, x: Tensor, into: Any) -> Tensor:
        into[len(into)] = x
        return x + into[len(into) - 3] if len(into) > 2 else x


class Note:
    own: Any = 0.0


class Noting(Layer):
    def leave(self, x: Tensor, into: Any) -> Tensor:
        into.own = into.own + self.own
        return x


class Global(Layer):
    def forward(self, input: Tensor, into: Any = None) -> Tensor:
        x = super().forward(input)
        FOUND.append(x)
        return x


class Model(nn.Module):
    layer: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer() for _ in range(6))

    def run(self, x: Tensor, *into: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *into)
        return x


class Attributes(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x)
        layers: Any = self.layers
        return x + sum(layer.own for layer in layers)


class OneByOne(Model):
    def forward(self, x: Tensor) -> Tensor:
        total: Any = 0
        for layer in self.layers:
            x = layer(x)
            total = total + layer.own
        return x * total


class Inner(Model):
    layer = Nested

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x)
        return x + sum(part.own for part in self.modules() if isinstance(part, Layer))


class Deques(Model):
    layer = Putting

    def forward(self, x: Tensor) -> Tensor:
        into: deque[Tensor] = deque()
        x = self.run(x, into)
        return x + sum(into)


class Dicts(Model):
    layer = Putting

    def forward(self, x: Tensor) -> Tensor:
        into: Any = defaultdict(list)
        x = self.run(x, into)
        return x + into["last"] * into["count"] + sum(into["sums"])


class FromLayerToLayer(Model):
    layer = Reading

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, {})


def require_same(make: Callable[[], nn.Module], cuts: list[str]) -> None:
    """Raise unless the stages compute what the model does, call after call."""
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    plain = make()
    pieces = tl.split.by_names(model, cuts, example=(torch.randn(2, WIDTH),))
    for _ in range(3):
        x = torch.randn(2, WIDTH)
        found, right = pieces(x.clone()), plain(x.clone())
        assert torch.equal(found, right)
        (found.sum() + right.sum()).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or (other.grad is not None and torch.equal(one.grad, other.grad))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("kind", [OneByOne, Inner, Deques, Dicts, FromLayerToLayer])
def test_as_in_the_plain_model(kind: type[nn.Module], schedule: str) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    require_plain_training(kind, (x,), y, schedule=schedule, ranks=2, microbatches=PARTS)


class Objects(Model):
    layer = Noting

    def forward(self, x: Tensor) -> Tensor:
        note = Note()
        return self.run(x, note) + note.own


class Globals(Model):
    layer = Global

    def forward(self, x: Tensor) -> Tensor:
        FOUND.clear()
        return self.run(x) + sum(FOUND)


class Adding(Layer):
    def leave(self, x: Tensor, into: Any) -> Tensor:
        into += x.detach().mean(0)
        return x


class Sums(Model):
    layer = Adding

    def forward(self, x: Tensor) -> Tensor:
        into = torch.zeros(WIDTH)
        return self.run(x, into) + into


@pytest.mark.parametrize("kind", [Objects, Globals, Sums])
def test_what_a_later_stage_uses(kind: type[nn.Module]) -> None:
    require_same(kind, ["layers.2", "layers.4"])


class Scaled(nn.Linear):
    scale = 1.0

    def __init__(self, scale: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = scale


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled(2.0 + number) for number in range(4))

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.layers
        for layer in layers:
            x = layer(x)
        return x * sum(layer.scale for layer in layers)


def test_a_default_in_the_class_hides_nothing() -> None:
    torch.manual_seed(0)
    model, x = Scaling(), torch.randn(2, WIDTH)
    pieces = tl.split.by_names(model, ["layers.2"], example=(x,))
    torch.testing.assert_close(pieces(x), model(x))


class Outer(nn.Module):
    """Keeps methods, as wrappers of models do."""

    def __init__(self, of: str = "") -> None:
        super().__init__()
        self.inner = Attributes()
        self.method = self.inner.get_submodule(of).forward

    def forward(self, x: Tensor) -> Tensor:
        return self.method(x)


def test_a_method_of_what_is_cut() -> None:
    torch.manual_seed(0)
    model, x = Outer(), torch.randn(2, WIDTH)
    pieces = tl.split.by_names(model, ["inner.layers.2"], example=(x,))
    torch.testing.assert_close(pieces(x), model(x))
    direct = Outer("layers.1")  # the layer's forward, without the layer
    message = r"does not call 'inner\.layers\.2', so no stage can begin there"
    with pytest.raises(PartitionError, match=message):
        tl.split.by_names(direct, ["inner.layers.2"], example=(x,))


class AddsOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, written: Tensor) -> Tensor:
        written.add_(1)
        return self.linear(x) + written


class WritesShared(nn.Module):
    """A unit changes a tensor that each stage can compute."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.uses = uses
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.adds = AddsOne()

    def forward(self, x: Tensor) -> Tensor:
        if self.uses == "argument":
            x += 1
            whole = x
        else:
            x = self.layers[0](x)
            whole = x * 1
        view, product = whole[:], whole * 2
        y = self.layers[1](self.adds(x * 1, whole))
        return self.layers[2](y) + {"view": view, "product": product}.get(self.uses, whole) + x


@pytest.mark.parametrize("uses", ["whole", "view", "product", "argument"])
@pytest.mark.parametrize("cuts", [["layers.1"], ["layers.2"], ["layers.1", "layers.2"]])
def test_a_unit_that_changes_what_a_later_stage_uses(uses: str, cuts: list[str]) -> None:
    require_same(lambda: WritesShared(uses), cuts)


def test_a_unit_that_changes_what_came_with_a_view_of_it() -> None:
    message = r"test_side_effects\.py:\d+ changes a value in place in stage 1, .* view of it"
    with pytest.raises(PartitionError, match=message):
        tl.split.by_names(WritesShared("view"), ["adds"], example=(torch.randn(2, WIDTH),))
