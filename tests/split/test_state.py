"""What a forward leaves behind that is cut at split points: buffers, memory, losses and skips."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import PartitionError
from tests.split.models import BEGINNING, Three

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Counts(Three):
    """Has buffers, and a forward that a test chooses."""

    total: Tensor

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.__dict__["body"] = body

    def forward(self, x: Tensor) -> Tensor:
        return self.__dict__["body"](self, x)


def counts(self: Any, x: Tensor) -> Tensor:
    x = self.a(x)
    self.total.add_(x.detach().sum(0))
    x = x + self.total
    tl.pipe_split()
    return self.b(x)


def changes_what_it_is_given(self: Any, x: Tensor) -> Tensor:
    x = self.a(x)
    tl.pipe_split()
    x.mul_(2)
    with torch.no_grad():
        x.mul_(2)
    return self.b(x)


def changes_its_own_values(self: Any, x: Tensor) -> Tensor:
    x = self.a(x).relu_() * 1.0
    view = x[0].mul_(2)
    tl.pipe_split()
    with torch.no_grad():
        shift = x.sum(0)
    return self.b(x) + view + shift.add_(1)


def regions(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = self.a(x)
        tl.pipe_split()
        x = self.b(x)
    with torch.no_grad():
        scale = x.sum()
        tl.pipe_split()
        scale = scale + 1
    return self.c(x.float()) * scale


def skips(self: Any, x: Tensor) -> Tensor:
    tl.skip.put("x", x)
    x = self.a(x)
    tl.pipe_split()
    return self.b(x) + tl.skip.get("x")


@pytest.mark.parametrize(
    "body", [counts, changes_what_it_is_given, changes_its_own_values, regions, skips]
)
def test_as_the_module(body: Callable[..., Tensor]) -> None:
    model = Counts(body)
    reference, pipe = copy.deepcopy(model), tl.pipeline(model, (X,))
    for _ in range(3):
        found, expected = pipe(X), reference(X)
        assert torch.equal(found, expected)
        (found.sum() + expected.sum()).backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)  # pyright: ignore
    assert torch.equal(model.total, reference.total)


def test_a_buffer_is_in_the_stage_that_changes_it() -> None:
    pipe = tl.pipeline(Counts(counts), (X,))
    buffers = [dict(pipe.get_stage_module(stage).named_buffers()) for stage in (0, 1)]
    assert ["total" in each for each in buffers] == [True, False]


def viewed(self: Any, x: Tensor) -> Tensor:
    """Another stage would see what later micro-batches have made of the buffer."""
    view, x = self.total[None], self.a(x)
    with torch.no_grad():
        self.total.add_(1)
    tl.pipe_split()
    return self.b(x) + view


def functional(self: Any, x: Tensor) -> Tensor:
    x = nn.functional.batch_norm(self.a(x), self.total, self.var, training=True)
    tl.pipe_split()
    return self.b(x + self.total)


def assigns(self: Any, x: Tensor) -> Tensor:
    x = self.a(x)
    self.total = self.total + x.detach().sum(0)
    tl.pipe_split()
    return self.b(x)


USED = r"changes 'total', which stages \[0, 1\] use; cut"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Counts(viewed), USED),
        (lambda: Counts(functional), USED),
        (lambda: Counts(assigns), r"its attribute 'total', and sets it for .*copy_"),
        (
            lambda: nn.Sequential(Counts(assigns), nn.Linear(4, 4)),
            r"its attribute '0.total', and sets it for .*copy_",
        ),
    ],
)
def test_a_buffer_that_stages_cannot_follow(make: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(PartitionError, match=text):
        tl.pipeline(make(), (X,))


def test_losses_and_statistics_of_a_step() -> None:
    def loses(self: Any, x: Tensor) -> Tensor:
        x = self.a(x)
        tl.add_loss(x.mean())
        tl.pipe_split()
        return self.b(x)

    model = Counts(loses)
    pipe = tl.pipeline(model, (X,))
    with tl.collect_losses() as losses:
        pipe(X)
    assert torch.equal(losses[0], model.a(X).mean())
    norm = nn.Sequential(tl.DeferredBatchNorm(4), nn.Linear(4, 4))
    reference = copy.deepcopy(norm)
    pipe = tl.pipeline(norm, (X,), split_spec={"1": BEGINNING})
    assert torch.equal(pipe(X), reference(X))
    assert torch.equal(norm.get_buffer("0.running_mean"), reference.get_buffer("0.running_mean"))
