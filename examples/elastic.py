"""Training that goes on when a rank is lost, with the ranks that are left.

python examples/elastic.py                               # in this process: nobody can be lost

A launcher must not end the other ranks, as torchrun does with all that it has started. So start
each rank by itself, or with a torchrun of its own:

for rank in 0 1 2; do
    RANK=$rank WORLD_SIZE=3 MASTER_ADDR=localhost MASTER_PORT=29500 \\
        python examples/elastic.py --lose 1 &
done; wait

With --lose 1 rank 1 kills itself in step 5. The losses are those of a run in which it does not.
"""

import argparse
import os
import signal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lose", type=int, default=-1, help="the rank that kills itself")
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
x = torch.rand(64, 32)
data = DataLoader(TensorDataset(x, x.cumsum(1) / 32), batch_size=16, shuffle=True)

pipe = tl.Pipeline(
    model, example=(x[:4],), microbatches=4, loss_fn=F.mse_loss, device="cpu", elastic=True
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)

with pipe.elastic(optimizer, on_recovery=print):
    batches = pipe.loader(data)
    step = 0
    for _ in range(options.epochs):
        for inputs, targets in batches:
            step += 1
            loss = pipe.step(inputs, target=targets)
            pipe.clip_grad_norm_(1.0)
            if step == 5 and str(options.lose) == os.environ.get("RANK"):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if pipe.is_first:
                print(f"step {step}: loss {loss:.6f}, on {pipe.plan.ranks} ranks", flush=True)
