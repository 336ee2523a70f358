"""A pipeline that must train as the plain model does.

torchrun --nproc-per-node 2 tests/torchrun_pipeline.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

import taktline as tl

STEPS = 30


def model() -> nn.Sequential:
    """Four blocks, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def main() -> None:
    """Train both, and compare the losses of every step."""
    plain = model()
    pipe = tl.Pipeline(
        model(), cuts=["1", "2", "3"], schedule="zbv", microbatches=4, loss_fn=mse_loss
    )
    with pipe:
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (plain, pipe)]
        x = torch.randn(32, 16)
        target = x.roll(1, dims=1).tanh()
        losses: list[float] = []
        for _ in range(STEPS):
            expected = mse_loss(plain(x), target)
            expected.backward()
            losses.append(float(pipe.step(x, target=target)))
            torch.testing.assert_close(losses[-1], expected.item(), rtol=1e-4, atol=1e-6)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert losses[-1] < 0.7 * losses[0], losses
        if pipe.is_first:
            print(
                f"torch {torch.__version__}: a pipeline of two processes went from a loss of "
                f"{losses[0]:.3f} to {losses[-1]:.3f} in {STEPS} steps, as the plain model does"
            )


if __name__ == "__main__":
    main()
