"""A pipeline whose stages are sharded with FSDP2: two stages, two shards of each.

torchrun --nproc-per-node 4 examples/fsdp.py
python examples/fsdp.py        # without copies: two ranks in this process
"""

import argparse
import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--way", choices=["fsdp", "ddp"], default="fsdp")
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()


class Model(nn.Module):
    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


world = int(os.environ.get("WORLD_SIZE", 1))
device = "cuda" if world > 1 and torch.cuda.device_count() >= world else "cpu"
mesh = None
if world > 1:
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (2, world // 2), mesh_dim_names=("pp", "dp"))

torch.manual_seed(0)  # the same model everywhere
pipe = tl.Pipeline(
    Model(),
    example=(torch.zeros(4, 64),),
    schedule="interleaved_1f1b",
    microbatches=4,
    loss_fn=nn.functional.mse_loss,
    ranks=2,
    mesh=mesh,
    data_parallel=None if mesh is None else options.way,
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3, foreach=True)
if pipe.is_first:
    print(pipe)

# Every rank draws the same batches, and takes the part of its replica.
generator = torch.Generator().manual_seed(1)
for step in range(options.steps):
    losses = []
    with pipe.accumulate():  # two steps, whose gradients are averaged over the copies once
        for _ in range(2):
            x = torch.randn(32, 64, generator=generator)[pipe.replica :: pipe.replicas]
            losses.append(pipe.step(x, target=x.sum(1, keepdim=True)))
    norm = pipe.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if pipe.is_first:
        print(f"step {step + 1}: loss {sum(losses) / 2:.3f}, norm {norm:.2f}")
