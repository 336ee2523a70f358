"""A model that cannot be cut: what is told of it."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl

X = torch.ones(2, 4)


class Layers(nn.Module):
    """Some layers in a row."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        return self.checked(x)

    def checked(self, x: Tensor) -> Tensor:
        return x


class Failing(Layers):
    """Fails in its own code."""

    def checked(self, x: Tensor) -> Tensor:
        raise KeyError("no such word")


class Odd(Layers):
    """Works by itself, but not where some of its layers are elsewhere."""

    def checked(self, x: Tensor) -> Tensor:
        there = [parameter for parameter in self.parameters() if parameter.data_ptr()]
        return x + 0.0 * len(there[5])


def pipeline(model: nn.Module, **options: Any) -> tl.Pipeline:
    usual = {"example": (X,), "microbatches": 2, "ranks": 2}
    return tl.Pipeline(model, **(usual | options))


def test_a_model_that_fails_by_itself() -> None:
    with pytest.raises(tl.TaktlineError) as refused:
        pipeline(Failing())
    assert "Failing fails by itself on the example, without any pipeline: KeyError" in str(
        refused.value
    )
    own = traceback.extract_tb(getattr(refused.value.__cause__, "__traceback__", None))
    assert own[-1].name == "checked"


def test_an_example_that_does_not_fit_the_model() -> None:
    model = Layers()
    with pytest.raises(tl.TaktlineError, match="Layers fails by itself on the example"):
        pipeline(model, example=(torch.ones(2, 5),))
    with pytest.raises(tl.TaktlineError, match=r"Layers fails by itself on the example.*argument"):
        pipeline(model, example=(X, X))
    assert model.calls == 0


def test_a_model_that_fails_only_in_stages() -> None:
    with pytest.raises(tl.TaktlineError) as refused:
        pipeline(Odd())
    assert "data_ptr needs the data of a value" in str(refused.value)


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("zbv", 2)])
def test_more_stages_than_layers(schedule: str, ranks: int) -> None:
    with pytest.raises(tl.TaktlineError) as refused:
        pipeline(Layers(), schedule=schedule, ranks=ranks)
    assert "into 3 stages or fewer: its forward calls 3 layers" in str(refused.value)


def test_a_batch_that_is_not_like_the_example() -> None:
    pipe = pipeline(Layers())
    with pytest.raises(tl.TaktlineError) as refused:
        pipe.eval(torch.ones(4, 5, dtype=torch.float64))
    notes = "\n".join(getattr(refused.value, "__notes__", []))
    assert "argument 0 is float64[4, 5] in this batch, and float32[2, 4] in the example" in notes
    assert pipe.eval(torch.ones(4, 4)).shape == (4, 4)
