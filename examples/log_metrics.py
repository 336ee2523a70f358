"""Metrics in TensorBoard or Weights & Biases: loss, speed, measured bubble, peak memory.

python examples/log_metrics.py                       # two ranks in this process
torchrun --nproc-per-node 2 examples/log_metrics.py --to tensorboard
WANDB_MODE=offline torchrun --nproc-per-node 2 examples/log_metrics.py --to wandb
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--to", choices=["lines", "tensorboard", "wandb"], default="lines")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--every", type=int, default=3)
options = parser.parse_args()


def logger(to: str) -> Callable[[dict[str, float], int], object]:
    """A function that logs the metrics of a step."""
    if to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter("runs")
        return lambda found, step: [writer.add_scalar(k, v, step) for k, v in found.items()]
    if to == "wandb":
        import wandb

        run = wandb.init(project="taktline", dir=".")
        return lambda found, step: run.log(found, step=step)
    return lambda found, step: print(
        f"step {step}: loss {found['loss']:.4f}, and {', '.join(sorted(found))}"
    )


torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)])
x = torch.randn(32, 32)
pipe = tl.Pipeline(model, example=(x[:4],), microbatches=8, loss_fn=nn.functional.mse_loss, ranks=2)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
log = logger(options.to) if pipe.is_first else None  # one rank logs for all
for step in range(1, options.steps + 1):
    # Every rank traces the steps that are logged, which measures their bubble.
    with pipe.trace() if step % options.every == 0 else nullcontext():
        loss = pipe.step(x, target=x.flip(1))
    optimizer.step()
    optimizer.zero_grad()
    if log and step % options.every == 0:  # not each step: reading the loss waits for the GPU
        log(pipe.metrics(), step)
