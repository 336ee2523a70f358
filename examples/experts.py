"""A mixture of experts, which are shared out over a mesh dimension "ep" in each stage.

torchrun --nproc-per-node 4 examples/experts.py
python examples/experts.py        # all experts together: two ranks in this process
"""

import argparse
import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
options = parser.parse_args()


class Experts(nn.Module):
    """Each token goes through two of the experts."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x)
        chosen = scores.topk(2).indices
        kept = torch.full_like(scores, float("-inf")).scatter(-1, chosen, scores.gather(-1, chosen))
        given = x.expand(len(self.up), *x.shape), kept.softmax(-1).T.unsqueeze(-1)
        if isinstance(self.up, DTensor):  # of its experts only
            mesh = self.up.device_mesh
            given = tuple(
                DTensor.from_local(part, mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
                for part in given
            )
        rows, weights = given
        found = (weights * torch.bmm(torch.bmm(rows, self.up).relu(), self.down)).sum(0)
        return x + (found.full_tensor() if isinstance(found, DTensor) else found)


def shard(stage: nn.Module, number: int) -> nn.Module:
    """Leave each process of "ep" its part of the experts."""
    for module in stage.modules():
        if mesh is not None and isinstance(module, Experts):
            for name in ("up", "down"):
                part = distribute_tensor(getattr(module, name).data, mesh["ep"], [Shard(0)])
                setattr(module, name, nn.Parameter(part))
    return stage


world = int(os.environ.get("WORLD_SIZE", 1))
mesh = None
if world > 1:
    device = "cuda" if torch.cuda.device_count() >= world else "cpu"
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (2, world // 2), mesh_dim_names=("pp", "ep"))

torch.manual_seed(0)  # the same model and batch everywhere
x = torch.randn(32, 16)
pipe = tl.Pipeline(
    nn.Sequential(*[Experts() for _ in range(4)]),
    **{"example": (x[:4],), "microbatches": 8, "loss_fn": nn.functional.mse_loss},
    **{"ranks": 2, "mesh": mesh, "prepare": shard},
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
for step in range(options.steps):
    loss = pipe.step(x, target=x.flip(1))
    norm = pipe.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if pipe.is_first:
        print(f"step {step + 1}: loss {loss:.4f}, norm {norm:.3f}")
