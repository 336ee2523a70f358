"""With check_finite, a step names what first produced a value that is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import taktline as tl
from tests.workers import Workers

X, Y = torch.linspace(-1, 1, 32).reshape(8, 4), torch.zeros(8, 4)


class Root(nn.Module):
    """Has no real result for what is negative."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x - x.detach().min() - 1e-3) if bool((x > 9).any()) else x


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), Root(), nn.Linear(4, 4)]


def pipeline(modules: Any = None, **options: Any) -> tl.Pipeline:
    usual: dict[str, Any] = {"microbatches": 4, "ranks": 3, "loss_fn": nn.functional.mse_loss}
    return tl.Pipeline(modules or stages(), check_finite=True, **(usual | options))


def large(microbatch: int) -> Tensor:
    """A batch with one micro-batch on which the stage in the middle fails."""
    batch = X.clone()
    batch[2 * microbatch : 2 * microbatch + 2] *= 100
    return batch


def test_names_the_stage_and_the_microbatch() -> None:
    pipe = pipeline()
    for batch in (large(2), X, large(1)):  # a first step, and later ones
        if batch is X:
            assert math.isfinite(pipe.step(batch, target=Y))
            continue
        with pytest.raises(tl.StageError) as caught:
            pipe.step(batch, target=Y)
        error = caught.value
        assert (error.rank, error.stage) == (1, 1)
        assert error.microbatch == (2 if torch.equal(batch, large(2)) else 1)
        assert "FloatingPointError: the output has nan (1 of 8 numbers), and earlier stages" in (
            str(error)
        )


def test_the_loss() -> None:
    pipe = pipeline(loss_fn=lambda output, target: (output - target).mean() / target.sum())
    with pytest.raises(tl.StageError, match=r"stage 2, micro-batch 0.*the loss has (inf|nan)"):
        pipe.step(X, target=Y)
    with pytest.raises(tl.StageError, match="the loss has"):
        pipe.eval(X, target=Y)


def test_the_batch_and_a_parameter() -> None:
    pipe = pipeline()
    with pytest.raises(tl.StageError, match=r"stage 0, .*the output has .* first, at the batch"):
        pipe.step(torch.full_like(X, math.inf), target=Y)
    with torch.no_grad():
        next(pipe.stages[2].parameters())[0, 0] = math.nan
    with pytest.raises(
        tl.StageError, match=r"stage 2, .*the loss has nan .*look at the parameters"
    ):
        pipe.step(X, target=Y)


class Masked(nn.Module):
    """Hands on a mask, and returns infinite numbers where it is set."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        if mask is None:
            return x, torch.full_like(x, -math.inf).triu(1)
        return (x + mask.to(x)).masked_fill(mask == -math.inf, -math.inf)


def test_what_may_be_infinite() -> None:
    modules = [nn.Linear(4, 4), Masked(), Masked()]
    pipe = pipeline(modules, loss_fn=lambda output, target: output.exp().mean(), microbatches=2)
    assert math.isfinite(pipe.step(X, target=Y))
    assert not torch.isfinite(pipe.eval(X)).all()
    weights = [1, 0]
    pipe = pipeline(
        stages()[::2], ranks=2, microbatches=2, loss_fn=lambda o, t: o.mean() / t.abs().sum()
    )
    target = torch.cat([torch.ones(4, 4), torch.zeros(4, 4)])
    assert math.isfinite(pipe.step(X, target=target, loss_weights=weights))


def over_processes(rank: int, group: Any) -> str:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    pipe = pipeline(mesh=mesh, ranks=None)
    assert math.isfinite(pipe.step(X, target=Y))
    with pytest.raises(tl.StageError) as caught:
        pipe.step(large(3), target=Y)
    assert math.isfinite(pipe.step(X, target=Y))
    return str(caught.value)


@pytest.mark.processes
def test_all_ranks_raise(workers: Workers) -> None:
    for text in workers.run(over_processes, ranks=3):
        assert text.startswith("rank 1, stage 1, micro-batch 3")
        assert "the output has nan" in text


def test_not_with_cuda_graphs() -> None:
    with pytest.raises(tl.TaktlineError, match="leave out check_finite"):
        pipeline(cuda_graphs=True)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_the_norm_of_no_gradients(norm_type: float) -> None:
    pipe = pipeline()
    norms = pipe.clip_grad_norm_(1.0, norm_type), pipe.grad_norm(norm_type)
    assert norms == (0, 0)
    plain = torch.nn.utils.clip_grad_norm_(stages()[0].parameters(), 1.0, norm_type)
    assert norms[0].dtype == plain.dtype == torch.float32


def test_the_largest_element_of_an_empty_gradient() -> None:
    class Empty(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.nothing = nn.Parameter(torch.zeros(0))

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + self.nothing.sum()

    pipe = pipeline([nn.Linear(4, 4), Empty()], ranks=2)
    pipe.step(X, target=Y)
    largest = max(float(p.grad.abs().max()) for p in pipe.parameters() if p.numel())  # pyright: ignore
    assert pipe.grad_norm(math.inf) == largest
