"""A LightningModule around a pipeline: Lightning's loop, callbacks and logs, our steps.

python examples/lightning_module.py                       # two ranks in this process
torchrun --nproc-per-node 2 examples/lightning_module.py  # a process each
"""

import argparse
from typing import Any

import pytorch_lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()


class Pipelined(L.LightningModule):
    """Steps are the pipeline's; everything around them is Lightning's."""

    def __init__(self, pipe: tl.Pipeline) -> None:
        super().__init__()
        self.pipe = pipe
        self.automatic_optimization = False  # a step of a pipeline has its backward in it

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.pipe.parameters(), lr=1e-2)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        optimizer: Any = self.optimizers()
        loss = self.pipe.step(x, target=y)
        self.pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        self.log("loss", loss)
        if self.pipe.is_first:
            print(f"step {self.global_step}: loss {loss:.4f}")
        return loss


torch.manual_seed(0)
x = torch.randn(64, 8)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
model = nn.Sequential(*layers, nn.Linear(8, 1))
pipe = tl.Pipeline(model, example=(x[:4],), microbatches=4, loss_fn=nn.functional.mse_loss, ranks=2)
trainer = L.Trainer(
    max_steps=options.steps,
    devices=1,  # of this process
    logger=False,
    enable_checkpointing=False,  # pipe.save does it
    enable_model_summary=False,
)
trainer.fit(Pipelined(pipe), pipe.loader(DataLoader(dataset, batch_size=16, shuffle=True)))
