"""Mixed precision: forwards in bfloat16, or in float16 with a scaled loss; weights in float32.

python examples/mixed_precision.py                       # two ranks in this process
torchrun --nproc-per-node 2 examples/mixed_precision.py  # a process each
"""

import argparse

import torch
from torch import nn

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
parser.add_argument("--steps", type=int, default=5)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)

torch.manual_seed(0)
model = nn.Sequential(
    *[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
)
x = torch.randn(16, 32)
pipe = tl.Pipeline(
    model,
    example=(x[:2],),
    schedule="zbv",
    microbatches=8,
    # Autocast applies to the loss, too; sums of many numbers are better made in float32.
    loss_fn=lambda output, target: nn.functional.mse_loss(output.float(), target),
    ranks=2,
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
scaler = pipe.scaler(enabled=dtype == torch.float16)  # one verdict for all ranks
for step in range(options.steps):
    with torch.autocast(pipe.device.type, dtype=dtype):
        loss = pipe.step(x, target=x.flip(1), scaler=scaler)
    scaler.unscale_(optimizer)
    pipe.clip_grad_norm_(1.0)
    scaler.step(optimizer)  # not on any rank, if a gradient on one is infinite
    scaler.update()
    optimizer.zero_grad()
    if pipe.is_first:
        print(f"step {step + 1}: loss {loss:.3f}")
