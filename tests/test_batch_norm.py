"""Running statistics of the whole batch, whatever the micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline.batch_norm import DeferredBatchNorm

DIM, ROWS = 4, 11


class Block(nn.Module):
    """A batch norm that is used twice; what it sees does not depend on how it normalises."""

    def __init__(self, momentum: float | None, checkpointed: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM, momentum=momentum)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        self.norm(2 * x + 1)
        y = self.linear(x)
        return y + 0 * self.norm(y)


def blocks(count: int, momentum: float | None = 0.1, *, checkpointed: bool = False) -> Any:
    torch.manual_seed(0)
    return [Block(momentum, checkpointed).double() for _ in range(count)]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    drawn = 3 * torch.randn(2, ROWS, DIM, dtype=torch.float64, generator=generator) + 5
    return [(drawn[0] + number, drawn[1]) for number in range(3)]


def buffers(modules: Any) -> dict[str, Tensor]:
    return dict(nn.ModuleList(modules).named_buffers())


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("microbatches", [1, 3, 5])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("zbv", 4)])
def test_they_are_those_of_the_batch(
    schedule: str, stages: int, microbatches: int, momentum: float | None, checkpointed: bool
) -> None:
    modules = blocks(stages, momentum, checkpointed=checkpointed)
    # Without checkpoints, which would update a plain batch norm twice.
    model = nn.Sequential(*blocks(stages, momentum))
    deferred = [DeferredBatchNorm.convert(module) for module in modules]
    pipe = tl.Pipeline(
        deferred, schedule=schedule, microbatches=microbatches, loss_fn=F.mse_loss, ranks=2
    )
    for x, target in batches():
        pipe.step(x, target=target)
        pipe.eval(x, target=target)
        model(x)
    found, expected = buffers(deferred), buffers(model)
    assert int(found["0.norm.num_batches_tracked"]) == 6  # two uses a step
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_plain_batch_norm_sees_micro_batches() -> None:
    modules, model = blocks(2), nn.Sequential(*blocks(2))
    pipe = tl.Pipeline(modules, schedule="1f1b", microbatches=3, loss_fn=F.mse_loss, ranks=2)
    x, target = batches()[0]
    pipe.step(x, target=target)
    model(x)
    found, expected = buffers(pipe.stages.values()), buffers(model)
    assert int(found["0.norm.num_batches_tracked"]) == 3 * 2
    assert not torch.allclose(found["0.norm.running_mean"], expected["0.norm.running_mean"])


def test_outside_of_a_pipeline_it_is_a_batch_norm() -> None:
    for momentum in (0.1, None):
        norm = nn.BatchNorm2d(3, momentum=momentum)
        deferred = DeferredBatchNorm.convert(copy.deepcopy(norm))
        assert isinstance(deferred, DeferredBatchNorm)
        for _ in range(3):
            x = torch.randn(4, 3, 5, 5)
            torch.testing.assert_close(deferred(x), norm(x), rtol=0, atol=0)
        torch.testing.assert_close(deferred.state_dict(), norm.state_dict())
        x = torch.randn(4, 3, 5, 5)
        torch.testing.assert_close(deferred.eval()(x), norm.eval()(x))


def test_a_step_that_fails_leaves_them_alone() -> None:
    modules = [DeferredBatchNorm.convert(module) for module in blocks(2)]
    before = copy.deepcopy(buffers(modules))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if target.isnan().any():
            raise ValueError("not a number")
        return F.mse_loss(output, target)

    pipe = tl.Pipeline(modules, schedule="1f1b", microbatches=3, loss_fn=loss_fn, ranks=2)
    x, target = batches()[0]
    with pytest.raises(tl.StageError, match="not a number"):
        pipe.step(x, target=target.clone().index_fill_(0, torch.tensor([9]), float("nan")))
    torch.testing.assert_close(buffers(modules), before, rtol=0, atol=0)
    pipe.step(x, target=target)
    assert int(buffers(modules)["1.norm.num_batches_tracked"]) == 2


def test_converting_keeps_names_values_and_sharing() -> None:
    norm = nn.BatchNorm2d(3, affine=False).eval()
    untracked = nn.BatchNorm1d(3, track_running_stats=False)
    model = nn.Sequential(norm, nn.Sequential(norm, untracked), nn.GroupNorm(1, 3))
    state, names = model.state_dict(), list(model.state_dict())
    converted: Any = DeferredBatchNorm.convert(model)
    assert converted is model
    assert converted[0] is converted[1][0]
    assert [type(converted[0]), type(converted[1][1])] == [DeferredBatchNorm] * 2
    assert isinstance(converted[2], nn.GroupNorm)
    assert not converted[0].training
    assert list(model.state_dict()) == names
    assert all(model.state_dict()[name].data_ptr() == state[name].data_ptr() for name in names)
    x = torch.randn(4, 3)
    torch.testing.assert_close(converted[1][1](x), untracked(x))


def test_too_few_dimensions() -> None:
    with pytest.raises(ValueError, match="expected at least 2 dimensions, not 1"):
        DeferredBatchNorm(3)(torch.ones(3))


def test_while_losses_are_collected() -> None:
    norm, usual = DeferredBatchNorm(DIM), nn.BatchNorm1d(DIM)
    x = torch.randn(ROWS, DIM) + 5
    with tl.collect_losses():
        norm(x)
    usual(x)
    torch.testing.assert_close(norm.state_dict(), usual.state_dict())
