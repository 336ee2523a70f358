"""What a step spends its time on: torch.profiler, with a range for each action of the plan.

python examples/profiling.py                       # two ranks in this process
torchrun --nproc-per-node 2 examples/profiling.py  # a process each

Writes profile-0.json, profile-1.json, … for https://ui.perfetto.dev, and step.perfetto.json, the
measured timeline of all ranks.
"""

import argparse
import os

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])
x = torch.randn(32, 64)
pipe = tl.Pipeline(
    model, example=(x[:4],), schedule="zbv", microbatches=8, ranks=2, loss_fn=nn.functional.mse_loss
)
rank = os.environ.get("RANK", "0")
activities = [ProfilerActivity.CPU]
if pipe.device.type == "cuda":
    activities.append(ProfilerActivity.CUDA)

# In the first step ranks exchange shapes, so it is left out.
with profile(
    activities=activities, schedule=schedule(wait=1, warmup=1, active=1, repeat=1)
) as profiler:
    for step in range(options.steps):
        loss = pipe.step(x, target=x)
        profiler.step()
        if pipe.is_first:
            print(f"step {step + 1}: loss {loss:.4f}")
profiler.export_chrome_trace(f"profile-{rank}.json")

with pipe.trace() as trace:
    pipe.step(x, target=x)
if pipe.is_first:
    trace.timeline.save("step.perfetto.json")
    ranges = {event.key for event in profiler.key_averages() if event.key.startswith("taktline")}
    print(f"{len(ranges)} actions in profile-{rank}.json, such as {min(ranges)!r}")
