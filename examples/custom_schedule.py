"""A schedule of your own, written down by hand, checked, drawn, and run.

python examples/custom_schedule.py                       # two ranks in this process
torchrun --nproc-per-node 2 examples/custom_schedule.py  # a process each
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
options = parser.parse_args()

# One line for each rank. 1F3 is the forward of micro-batch 3 on stage 1; I and W are the two halves
# of a backward: the gradients of the inputs, which the rank before waits for, and of the weights.
SCHEDULE = """\
0F0,0F1,0F2,0I0,0F3,0I1,0W0,0I2,0W1,0I3,0W2,0W3
1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3
"""

file = Path(tempfile.mkdtemp(), "mine.csv")
file.write_text(SCHEDULE)

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
pipe = tl.Pipeline(
    model,
    example=(torch.zeros(4, 32),),
    schedule=file,  # with its number of ranks and micro-batches
    loss_fn=nn.functional.mse_loss,
)
if pipe.is_first:
    print(pipe.plan)
    print("violations:", tl.validate(pipe.plan))
    print(f"bubble: {tl.simulate(pipe.plan).bubble():.1%}")
    other = tl.build("1f1b", ranks=2, microbatches=4)
    print(f"that of 1F1B: {tl.simulate(other).bubble():.1%}")

optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
x, target = torch.randn(16, 32), torch.randn(16, 32)
for step in range(options.steps):
    loss = pipe.step(x, target=target)
    optimizer.step()
    optimizer.zero_grad()
    if pipe.is_first:
        print(f"step {step + 1}: loss {loss:.4f}")
