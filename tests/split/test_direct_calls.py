"""Calls of a stage that look like an earlier one: as quick as bare layers."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import taktline as tl
from taktline.split.named.placeholder import Placeholder
from tests.split.forwards import (
    WIDTH,
    Branches,
    Chain,
    Checkpointed,
    Conditions,
    Counts,
    DrawsInPython,
    Global,
    Helpers,
    Hooks,
    Masks,
    Memory,
    Noise,
    Positions,
    Residual,
    Shapes,
    same_as_cold,
    split,
)
from tests.split.models import ResNet, ViT


def events(function: Callable[[], object]) -> list[str]:
    """The names of the functions in Python that run."""
    names: list[str] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return names


@pytest.mark.parametrize("kind", [Chain, Positions, Conditions, Shapes, Global, Helpers])
def test_the_price_does_not_depend_on_the_layers_before(kind: type[Chain]) -> None:
    runs: list[list[str]] = []
    for before in (2, 40):
        model = kind(before + 3).eval()
        cuts = [f"layers.{before}", f"layers.{before + 2}"]
        x = torch.randn(3, WIDTH)
        pieces = tl.split.by_names(model, cuts, example=(x,))
        given = pieces[0](x)
        pieces[1](*given)
        runs.append(events(lambda piece=pieces[1], given=given: piece(*given)))
    assert runs[0] == runs[1]
    assert f"{kind.__name__}.forward" not in runs[0]
    assert sum(name == "Linear.forward" for name in runs[0]) == 2


class Listed(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in [layer for layer in self.layers]:  # noqa: C416 - a function of its own
            x = layer(x)
        return self.norm(x)


class Mode(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            with torch.enable_grad():
                x = layer(x)
        return self.norm(x)


class Same(Chain):
    def forward(self, x: Tensor) -> Any:
        first = x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if x is not self.embed else layer(first)
        return self.norm(x)


@pytest.mark.parametrize("kind", [Listed, Mode, Same, Branches, Counts, DrawsInPython, Hooks])
def test_a_forward_that_may_do_something_else_runs_each_time(kind: type[Chain]) -> None:
    pieces, x = split(kind()), torch.randn(3, WIDTH)
    given = pieces[0](x)
    for _ in range(2):
        assert f"{kind.__name__}.forward" in events(lambda: pieces[1](*given))


def test_a_first_stage_that_draws_is_known_again() -> None:
    pieces, x = split(Noise()), torch.randn(3, WIDTH)
    pieces[0](x)
    assert not any("FirstRun" in name for name in events(lambda: pieces[0](x)))


@pytest.mark.parametrize(
    "make", [Residual, Branches, Global, Masks, Memory, Checkpointed, ViT, ResNet]
)
def test_later_calls_make_no_placeholders(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = make()
    path = "layers" if hasattr(model, "layers") else "blocks"
    x = torch.randn(2, 3, 8, 8) if path == "blocks" else torch.randn(3, WIDTH)
    pieces = tl.split.by_names(model, [f"{path}.1", f"{path}.2"], example=(x,))
    wanted = pieces(x)
    made: list[object] = []
    new: Any = Placeholder.__new__
    monkeypatch.setattr(
        Placeholder, "__new__", staticmethod(lambda *args, **kw: made.append(0) or new(*args, **kw))
    )
    found = pieces(x)
    assert not made
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_value_is_freed_when_the_next_one_is_there() -> None:
    """Without gradients, a stage of many layers has two activations, not all."""
    model = Chain()
    pieces = tl.split.by_names(model, ["layers.0", "norm"], example=(torch.zeros(3, WIDTH),))
    alive: list[int] = []
    made: list[Any] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        made.append(weakref.ref(output))
        alive.append(sum(each() is not None for each in made))

    for layer in model.layers:
        layer.register_forward_hook(note)
    with torch.no_grad():
        given = pieces[0](torch.randn(3, WIDTH))
        for _ in range(2):
            made.clear()
            alive.clear()
            pieces[1](*given)
    assert len(alive) == 6
    assert max(alive) == 2


def test_operations_after_the_last_layer() -> None:
    class Mean(Chain):
        def forward(self, x: Tensor) -> Any:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return F.relu(self.norm(x)).mean()

    torch.manual_seed(0)
    pieces = split(Mean())
    for _ in range(3):
        same_as_cold(pieces, torch.randn(3, WIDTH))
