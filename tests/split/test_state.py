"""What a forward leaves behind that is cut: buffers, memory, losses and skips."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import PartitionError
from tests.split.models import BEGINNING, Three


class Counts(Three):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.total.add_(x.detach().sum(0))
        x = x + self.total
        tl.pipe_split()
        return self.b(x)


def test_a_buffer_is_in_the_stage_that_changes_it() -> None:
    model = Counts()
    reference = copy.deepcopy(model)
    x = torch.randn(2, 4)
    pipe = tl.pipeline(model, (x,))
    assert [list(dict(pipe.get_stage_module(n).named_buffers())) for n in (0, 1)] == [["total"], []]
    for _ in range(3):
        assert torch.equal(pipe(x), reference(x))
    assert torch.equal(model.total, reference.total)


class Viewed(Counts):
    """Another stage would see what later micro-batches have made of the buffer."""

    def forward(self, x: Tensor) -> Tensor:
        view, x = self.total[None], self.a(x)
        with torch.no_grad():
            self.total.add_(1)
        tl.pipe_split()
        return self.b(x) + view


class Functional(Counts):
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.batch_norm(self.a(x), self.total, self.var, training=True)
        tl.pipe_split()
        return self.b(x + self.total)


@pytest.mark.parametrize("kind", [Viewed, Functional])
def test_a_buffer_that_one_stage_changes_and_another_uses(kind: type[Counts]) -> None:
    with pytest.raises(PartitionError, match=r"changes 'total', which stages \[0, 1\] use; cut"):
        tl.pipeline(kind(), (torch.randn(2, 4),))


def test_a_buffer_is_changed_in_place_or_refused() -> None:
    class Assigns(Counts):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            self.total = self.total + x.detach().sum(0)
            tl.pipe_split()
            return self.b(x)

    with pytest.raises(PartitionError, match=r"its attribute 'total', and sets it for .*copy_"):
        tl.pipeline(Assigns(), (torch.randn(2, 4),))
    outer = nn.Sequential(Assigns(), nn.Linear(4, 4))
    with pytest.raises(PartitionError, match=r"its attribute '0.total', and sets it for .*copy_"):
        tl.pipeline(outer, (torch.randn(2, 4),))


@pytest.mark.parametrize("region", [False, True])
def test_a_stage_that_changes_what_it_is_given(region: bool) -> None:
    class Begins(Three):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            tl.pipe_split()
            with torch.set_grad_enabled(not region):
                x.mul_(2)
            return self.b(x)

    model, x = Begins(), torch.randn(2, 4)
    assert torch.equal(tl.pipeline(model, (x,))(x), model(x))


def test_a_stage_that_changes_its_own_values() -> None:
    class Inside(Three):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x).relu_()
            view = x[0].mul_(2)
            tl.pipe_split()
            with torch.no_grad():
                shift = x.sum(0)
            return self.b(x) + view + shift.add_(1)

    model, x = Inside(), torch.randn(2, 4)
    assert torch.equal(tl.pipeline(model, (x,))(x), model(x))


def test_a_region_that_is_cut() -> None:
    class Regions(Three):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.a(x)
                tl.pipe_split()
                x = self.b(x)
            with torch.no_grad():
                scale = x.sum()
                tl.pipe_split()
                scale = scale + 1
            return self.c(x.float()) * scale

    model, x = Regions(), torch.randn(2, 4)
    pipe = tl.pipeline(model, (x,))
    assert pipe.num_stages == 3
    found, expected = (
        torch.autograd.grad(net(x).sum(), list(model.parameters())) for net in (pipe, model)
    )
    assert all(map(torch.equal, found, expected))


def test_a_skip() -> None:
    class Skips(Three):
        def forward(self, x: Tensor) -> Tensor:
            tl.skip.put("x", x)
            x = self.a(x)
            tl.pipe_split()
            return self.b(x) + tl.skip.get("x")

    model, x = Skips(), torch.randn(2, 4)
    assert torch.equal(tl.pipeline(model, (x,))(x), model(x))


def test_losses_and_statistics_of_a_step() -> None:
    class Loses(Three):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            tl.add_loss(x.mean())
            tl.pipe_split()
            return self.b(x)

    model, x = Loses(), torch.randn(2, 4)
    pipe = tl.pipeline(model, (x,))
    with tl.collect_losses() as losses:
        pipe(x)
    assert torch.equal(losses[0], model.a(x).mean())
    norm = nn.Sequential(tl.DeferredBatchNorm(4), nn.Linear(4, 4))
    reference = copy.deepcopy(norm)
    pipe = tl.pipeline(norm, (x,), split_spec={"1": BEGINNING})
    assert torch.equal(pipe(x), reference(x))
    assert torch.equal(norm.get_buffer("0.running_mean"), reference.get_buffer("0.running_mean"))
