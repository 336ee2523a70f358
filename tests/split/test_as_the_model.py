"""Stages do together what the model does: no submodule is left out, nothing is done twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import taktline as tl
from tests.split.transformers_models import LANGUAGES, texts

WIDTH = 8


X, TARGET = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0)).unbind()


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def test_a_wrapper_that_hands_on_its_arguments() -> None:
    model: Any = LANGUAGES["llama"].make()
    model.config.use_cache = True
    words = texts(4)[0]
    pipe = tl.Pipeline(Wrapper(model), example=(words[:2],), microbatches=2, ranks=2)
    output = pipe.eval(words)
    assert output.past_key_values is None
    torch.testing.assert_close(output.logits, model(words).logits)
    assert model.config.use_cache


def test_a_model_that_is_compiled_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    compiled: Any = torch.compile(model, backend="eager")
    options: dict[str, Any] = {"microbatches": 4, "loss_fn": F.mse_loss, "ranks": 2}
    pipe = tl.Pipeline(compiled, example=(X[:2],), **options)
    assert "compiled as a whole, but its stages are not" in caplog.text
    pipe.step(X, target=TARGET)
    found = [parameter.grad for parameter in model.parameters()]
    expected = torch.autograd.grad(F.mse_loss(model(X), TARGET), list(model.parameters()))
    torch.testing.assert_close(found, list(expected))


def test_the_norm_of_sparse_gradients() -> None:
    embed, head = nn.Embedding(10, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)
    pipe = tl.Pipeline([embed, head], microbatches=2, loss_fn=F.mse_loss, ranks=2)
    pipe.step(torch.tensor([1, 1, 2, 3]), target=TARGET[:4])
    dense = [p.grad.to_dense() for p in pipe.parameters() if p.grad is not None]
    expected = torch.cat([gradient.flatten() for gradient in dense]).norm()
    torch.testing.assert_close(pipe.grad_norm(), expected)
    pipe.clip_grad_norm_(0.1)
    torch.testing.assert_close(pipe.grad_norm(), torch.tensor(0.1), rtol=1e-4, atol=0)
