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
from tests.split.models import Three

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


def test_a_buffer_is_changed_as_in_the_module() -> None:
    model = Counts(counts)
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
