"""Programs written for torch.distributed.pipelining, run with torch's package or with ours."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

OURS = "taktline.compat.torch_pipelining"
TORCHS = "torch.distributed.pipelining"
CPU = torch.device("cpu")
WIDTH, BATCH = 8, 16


def schedules(source: str = OURS) -> Any:
    return import_module(f"{source}.schedules")


def stages(source: str = OURS) -> Any:
    return import_module(f"{source}.stage")


def make_layers(count: int) -> nn.ModuleList:
    torch.manual_seed(count)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        for _ in range(count)
    )


def make_batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(BATCH, WIDTH, generator=generator),
        torch.randn(BATCH, WIDTH, generator=generator),
    )


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


class Unsplit:
    """What the whole model gives for a batch."""

    def __init__(self, layers: nn.ModuleList, steps: int = 1, microbatches: int = 0) -> None:
        self.layers = copy.deepcopy(layers)
        x, target = make_batch()
        for _ in range(steps):
            self.output = x
            for layer in self.layers:
                self.output = layer(self.output)
            self.loss = loss_fn(self.output, target)
            # With a number of micro-batches: as their sum, not as their mean.
            (self.loss * (microbatches or 1)).backward()

    def check(self, mine: dict[int, nn.Module]) -> None:
        """Compare the gradients of some stages."""
        for stage, module in mine.items():
            expected = dict(self.layers[stage].named_parameters())
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None, f"{stage}.{name}"
                torch.testing.assert_close(parameter.grad, expected[name].grad)


class Program:
    """Stages of one rank, and steps that give each rank its share of the batch.

    With ``calls``, steps go call by call.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        count: int,
        mine: list[int],
        source: str = OURS,
        stage_class: Any = None,
        calls: bool = False,
        **options: Any,
    ) -> None:
        self.layers = make_layers(count)
        self.reference = copy.deepcopy(self.layers)
        self.modules = {index: self.layers[index] for index in mine}
        cls = stage_class or stages(source).PipelineStage
        self.stages = [
            cls(self.modules[index], index, count, CPU, group=group, **options) for index in mine
        ]
        for stage in self.stages if calls else ():
            wrapped(stage)
        self.first, self.last = 0 in mine, count - 1 in mine

    def step(self, schedule: Any, call: str = "step", **options: Any) -> tuple[Any, list[Tensor]]:
        x, target = make_batch()
        losses: list[Tensor] = []
        if self.last:
            options |= {"target": target, "losses": losses}
        return getattr(schedule, call)(*([x] if self.first else []), **options), losses

    def train(self, schedule: Any, steps: int = 2) -> None:
        """Train, and compare with the whole model."""
        output, losses = None, []
        for _ in range(steps):
            for module in self.modules.values():
                module.zero_grad()
            output, losses = self.step(schedule)
        scale = 0 if schedule.scale_grads else schedule._n_microbatches
        unsplit = Unsplit(self.reference, microbatches=scale)
        unsplit.check(self.modules)
        if self.last:
            torch.testing.assert_close(output, unsplit.output)
            torch.testing.assert_close(torch.stack(losses).mean(), unsplit.loss)


def wrapped(stage: Any) -> None:
    """Put a function in a method's place, as programs do, so that a step goes call by call."""
    method = stage.forward_one_chunk
    stage.forward_one_chunk = lambda *args, **kwargs: method(*args, **kwargs)
