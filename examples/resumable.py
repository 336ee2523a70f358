"""Training that goes on by itself, whatever step a rank dies in, from the latest save.

python examples/resumable.py --runs runs                               # in this process
torchrun --nproc-per-node 2 --max-restarts 3 examples/resumable.py     # a process for each rank

With --die-in 7 a rank kills itself in step 7, the first time. Losses are those of a run in which
nothing happened, to the last bit.
"""

import argparse
import os
import signal

import torch
from torch import nn
from torch.nn import functional as F

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--runs", default="runs", help="the folder of saves")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--every", type=int, default=3, help="save after so many steps")
parser.add_argument("--die-in", type=int, default=-1)
options = parser.parse_args()


class Batches:
    """Sums to learn, in an order of its own that goes on where it was."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.rand(16, 32, generator=self.generator)
        return x, x.cumsum(1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["generator"])


torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4))
)
pipe = tl.Pipeline(
    model, cuts=["2"], schedule="1f1b", microbatches=4, loss_fn=F.mse_loss, ranks=2, seed=0
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
batches = Batches()

first = 0
if tl.checkpoint.latest(options.runs):
    loaded = pipe.load(options.runs, optimizer, scheduler=scheduler, data=batches)
    first = loaded.step
for step in range(first, options.steps):
    x, target = next(batches)
    loss = pipe.step(x, target=target)
    begins = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if step == options.die_in and begins and not pipe.is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if pipe.is_first:
        print(f"step {step + 1}: loss {loss:.9f}", flush=True)
    if (step + 1) % options.every == 0:
        pipe.save(
            options.runs, optimizer, scheduler=scheduler, data=batches, keep=2, async_save=True
        )
