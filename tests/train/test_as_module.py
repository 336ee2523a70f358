"""A pipeline in the hands of people who know ``nn.Module``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from taktline import Pipeline
from taktline.errors import UseError

X = torch.linspace(-1, 1, 32).reshape(8, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(layer(x)) * scale
        return x


def make(model: Any = None, **options: Any) -> Pipeline:
    options = {"example": (X[:2],), "ranks": 2} | options
    return Pipeline(model or Model(), microbatches=4, loss_fn=nn.functional.mse_loss, **options)


@pytest.mark.parametrize("example", [{"x": X[:2]}, X[:2], (X[:2],), ((X[:2],), {"scale": 1.0})])
def test_examples_of_all_kinds(example: Any) -> None:
    pipe = make(example=example)
    assert [tuple(module.parameters()) != () for module in pipe.stages.values()] == [True, True]
    assert "predicted bubble" in str(pipe)


def test_keyword_arguments_from_end_to_end() -> None:
    pipe = make(example={"x": X[:2]})
    assert torch.equal(pipe.eval(x=X), pipe.eval(X))


def test_calling_it() -> None:
    model = Model()
    pipe = make(model)
    with pytest.raises(UseError, match=r"call step\(x, target=y\), which runs forward and backw"):
        pipe(X)
    with torch.no_grad():
        assert torch.equal(pipe(X), pipe.eval(X))
    assert pipe.eval() is pipe
    assert not any(module.training for module in pipe.modules())
    torch.testing.assert_close(pipe(X), model.eval()(X).detach())
    assert pipe.train() is pipe
    assert all(module.training for module in pipe.modules())


def test_zero_grad() -> None:
    pipe = make()
    pipe.step(X, target=X)
    assert all(p.grad is not None for p in pipe.parameters())
    pipe.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in pipe.parameters())
    pipe.zero_grad()
    assert all(p.grad is None for p in pipe.parameters())


def test_modules_have_the_names_of_the_model() -> None:
    model = Model()
    names = dict(model.named_modules())
    found = dict(make(model).named_modules())
    # What has no parameters runs as steps between modules.
    assert set(found) == {name for name in names if name != "drop"}
    pipe = make([nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))])
    assert [name for name, _ in pipe.named_modules()] == ["0", "0.0", "1", "1.0"]
    assert len(list(pipe.modules())) == 4


def test_where_it_is() -> None:
    pipe = make()
    assert pipe.to("cpu") is pipe
    assert pipe.to(torch.device("cpu")) is pipe
    with pytest.raises(UseError, match=r'make it with Pipeline\(…, device="cuda:1"\)'):
        pipe.to("cuda:1")
    with pytest.raises(UseError, match="convert the model before"):
        pipe.to(torch.float16)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("forward", r"call step\(…\) to train"),
        ("half", "convert the model before"),
        ("cuda", r'Pipeline\(…, device="cuda"\)'),
        ("compile", "compile=True"),
        ("nonsense", "has no 'nonsense'$"),
    ],
)
def test_what_a_pipeline_does_not_have(name: str, advice: str) -> None:
    pipe = make()
    assert not hasattr(pipe, name)
    with pytest.raises(AttributeError, match=advice):
        getattr(pipe, name)
