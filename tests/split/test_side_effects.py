"""What layers leave behind beside their outputs: in attributes, and in what they are given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import PartitionError
from tests.split.test_idioms import Net, X, require_same


class Layer(nn.Linear):
    """Has a loss of its own, which it keeps, or puts where it is told to."""

    own: Any = 0.0
    scale = 1.0

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = 2.0

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
        return x + into[len(into) - 2] if len(into) > 1 else x


class Note:
    own: Any = 0.0


class Noting(Layer):
    def leave(self, x: Tensor, into: Any) -> Tensor:
        into.own = into.own + self.own
        return x


def run(self: Any, x: Tensor, into: Any) -> Tensor:
    for block in self.blocks:
        x = block(x, into)
    return x


def one_by_one(self: Any, x: Tensor) -> Tensor:
    total: Any = 0
    for block in self.blocks:
        x = block(x)
        total = total + block.own
    return x * total


def inner(self: Any, x: Tensor) -> Tensor:
    x = self.run(x)
    return x + sum(part.own for part in self.modules() if isinstance(part, Layer))


def dicts(self: Any, x: Tensor) -> Tensor:
    into: Any = defaultdict(list)
    x = run(self, x, into)
    return x + into["last"] * into["count"] + sum(into["sums"])


def from_layer_to_layer(self: Any, x: Tensor) -> Tensor:
    return run(self, x, {})


def notes(self: Any, x: Tensor) -> Tensor:
    note = Note()
    return run(self, x, note) + note.own


@pytest.mark.parametrize(
    ("body", "block"),
    [
        *((one_by_one, Layer), (inner, Nested), (dicts, Putting)),
        *((from_layer_to_layer, Reading), (notes, Noting)),
    ],
)
def test_what_a_later_stage_uses(body: Any, block: Callable[[], nn.Module]) -> None:
    require_same(lambda: Net(body, block), X)


class Outer(nn.Module):
    """Keeps methods, as wrappers of models do."""

    def __init__(self, of: str = "") -> None:
        super().__init__()
        self.inner = Net(one_by_one, Layer)
        self.method = self.inner.get_submodule(of).forward

    def forward(self, x: Tensor) -> Tensor:
        return self.method(x)


def test_a_method_of_what_is_cut() -> None:
    require_same(Outer, X, cuts=["inner.blocks.2"])
    direct = Outer("blocks.1")  # the layer's forward, without the layer
    message = r"does not call 'inner\.blocks\.2', so no stage can begin there"
    with pytest.raises(PartitionError, match=message):
        tl.split.by_names(direct, ["inner.blocks.2"], example=(X,))


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
        torch.manual_seed(0)
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
    require_same(lambda: WritesShared(uses), X.clone(), cuts=cuts)


def test_a_unit_that_changes_what_came_with_a_view_of_it() -> None:
    message = r"test_side_effects\.py:\d+ changes a value in place in stage 1, .* view of it"
    with pytest.raises(PartitionError, match=message):
        tl.split.by_names(WritesShared("view"), ["adds"], example=(X,))
