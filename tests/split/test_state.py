"""What a traced forward leaves behind: buffers, memory, losses and skips."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import PartitionError, SkipError
from tests.split.models import BEGINNING, Three


class Counts(Three):
    """Assigns a buffer; a trace does so at its end."""

    total: Tensor

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.total = self.total + x.detach().sum(0)
        seen = x + self.total
        tl.pipe_split()
        return self.b(x + self.total.clone() if self.late else seen)


def test_a_buffer_is_assigned_where_it_is_computed() -> None:
    model = Counts(late=False)
    reference = copy.deepcopy(model)
    x = torch.randn(2, 4)
    pipe = tl.pipeline(model, (x,))
    assert [list(dict(pipe.get_stage_module(n).named_buffers())) for n in (0, 1)] == [["total"], []]
    for _ in range(3):
        assert torch.equal(pipe(x), reference(x))
    assert torch.equal(model.total, reference.total)


@pytest.mark.parametrize("region", [False, True])
@pytest.mark.parametrize("assigns", [False, True])
def test_a_view_of_a_buffer_that_changes_does_not_cross(assigns: bool, region: bool) -> None:
    class Viewed(Counts):
        def forward(self, x: Tensor) -> Tensor:
            view, x = self.total[None], self.a(x)
            with torch.set_grad_enabled(not region):
                if assigns:
                    self.total = self.total + 1
                else:
                    self.total.add_(1)
            tl.pipe_split()
            return self.b(x) + view

    with pytest.raises(PartitionError, match=r"stage 0 changes 'total' .*, which stage 1 uses too"):
        tl.pipeline(Viewed(late=False), (torch.randn(2, 4),))


def test_a_buffer_of_a_submodule_is_changed_in_place_or_refused() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Counts(late=False), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x))

    with pytest.raises(PartitionError, match=r"assigns 'inner\.total', .* change it in place"):
        tl.pipeline(Outer(), (torch.randn(2, 4),))


def test_statistics_that_one_stage_changes_and_another_reads() -> None:
    class Functional(Three):
        mean: Tensor
        var: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.batch_norm(self.a(x), self.mean, self.var, training=True)
            tl.pipe_split()
            return self.b(x + self.mean)

    with pytest.raises(PartitionError, match=r"stage 0 changes 'mean' .*, which stage 1 uses too"):
        tl.pipeline(Functional(), (torch.randn(2, 4),))


def test_a_buffer_that_one_stage_writes_and_another_reads() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(self.norm(x)))

    with pytest.raises(
        PartitionError, match=r"stage 0 changes 'norm.*' .*, which stage 1 uses too"
    ):
        tl.pipeline(Shared(), (torch.ones(2, 4),), split_spec={"linear": BEGINNING})


def test_memory_that_is_shared_across_a_boundary_and_written_to() -> None:
    class Writes(Three):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            view = x[0]
            tl.pipe_split()
            x.mul_(2)
            return self.b(x) + view

    with pytest.raises(
        PartitionError, match=r"stage 1 changes .* in place .* move the split point"
    ):
        tl.pipeline(Writes(), (torch.ones(2, 4),))


@pytest.mark.parametrize("region", [False, True])
def test_a_stage_that_changes_what_it_is_given(region: bool) -> None:
    class Begins(Three):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            tl.pipe_split()
            with torch.set_grad_enabled(not region):
                x.relu_()
            return self.b(x)

    with pytest.raises(PartitionError, match=r"stage 1 changes 'linear' .* makes a new tensor"):
        tl.pipeline(Begins(), (torch.ones(2, 4),))


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


def test_a_skip_is_an_edge_of_the_trace() -> None:
    class Skips(Three):
        def forward(self, x: Tensor) -> Tensor:
            tl.skip.put("x", x)
            x = self.a(x)
            tl.pipe_split()
            return self.b(x) + tl.skip.get("x")

    model, x = Skips(), torch.randn(2, 4)
    assert torch.equal(tl.pipeline(model, (x,))(x), model(x))


def test_losses_are_refused() -> None:
    class Loses(Three):
        def forward(self, x: Tensor) -> Tensor:
            tl.add_loss(x.mean())
            return super().forward(x)

    with pytest.raises(PartitionError, match=r"has add_loss\(\), which a trace does not keep; cut"):
        tl.pipeline(Loses(), (torch.ones(2, 4),), split_spec={"b": BEGINNING})
    norm = nn.Sequential(tl.DeferredBatchNorm(4), nn.Linear(4, 4))
    with pytest.raises(PartitionError, match=r"has DeferredBatchNorm, which a trace"):
        tl.pipeline(norm, (torch.ones(2, 4),), split_spec={"1": BEGINNING})


def test_a_skip_that_nobody_gets() -> None:
    class Lost(Three):
        def forward(self, x: Tensor) -> Tensor:
            tl.skip.put("lost", x)
            return super().forward(x)

    with pytest.raises(SkipError, match="no stage gets 'lost'"):
        tl.pipeline(Lost(), (torch.ones(2, 4),), split_spec={"b": BEGINNING})
