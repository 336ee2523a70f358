"""What stages compute and send is known before the first step, whatever the forward does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import PartitionError

WIDTH = 8


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Counted(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


class Checking(Plain):
    """Refuses what has no data, or zeros."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.detach().sum().item():
            raise ValueError("the batch is empty")
        return super().forward(x)


class Shared(Plain):
    """Has a module in two places, and a weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH)] * 2)
        first, last = self.get_parameter("layers.0.weight"), self.get_submodule("layers.3")
        last.weight = first

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(super().forward(x))
        return x


class SharedChecking(Shared, Checking):
    pass


def compiled() -> nn.Module:
    model = Plain()
    for key, layer in model.layers.named_children():
        block: Any = torch.compile(layer, backend="eager")
        model.layers.register_module(key, block)
    return model


@pytest.mark.parametrize("make", [Plain, Counted, Checking, compiled])
def test_work_is_counted(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.ones(4, WIDTH)
    state, drawn = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    pipe = tl.Pipeline(
        model, example=(x[:2],), microbatches=2, loss_fn=nn.functional.mse_loss, ranks=2
    )
    assert "from counted operations" in str(pipe)
    assert pipe.boundaries[0][0].shape == (2, WIDTH)
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("make", [Shared, SharedChecking])
def test_what_is_shared_stays_as_it_is(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.randn(4, WIDTH)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: tensor.clone() for name, tensor in named.items()}
    pipe = tl.Pipeline(model, example=(x[:2],), microbatches=2, loss_fn=nn.functional.mse_loss)
    assert "from counted operations" in str(pipe)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor is named[name], name
        assert torch.equal(tensor, values[name]), name


def test_what_is_shared_stays_as_it_is_if_the_model_fails() -> None:
    model, x = SharedChecking(), torch.zeros(4, WIDTH)
    buffers = dict(model.named_buffers())
    with pytest.raises(PartitionError, match="fails by itself"):
        tl.Pipeline(model, example=(x[:2],), microbatches=2, ranks=2)
    for name, tensor in model.named_buffers():
        assert tensor is buffers[name], name


def test_the_table_says_that_it_does_not_know_what_prepare_does() -> None:
    options: dict[str, Any] = {"microbatches": 2, "ranks": 2, "cuts": ["1"]}
    options["example"] = (torch.ones(2, 4),)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    note = "peak: activations of a rank; all before prepare="
    assert note not in str(tl.Pipeline(model, **options))
    prepared = tl.Pipeline(model, **options, prepare=lambda module, stage: module)
    assert str(prepared).endswith(note)
