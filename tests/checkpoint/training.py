"""A training with all that a checkpoint must bring back: dropout, AdamW, schedules, data, ties."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LinearLR, MultiStepLR

import taktline as tl
from taktline import checkpoint
from tests.train.models import LENGTH, LM, WORDS, loss_fn

MICROBATCHES = 4


class DropLM(LM):
    """A tied language model with dropout after each block."""

    def __init__(self, dropout: float = 0.2, tied: bool = True) -> None:
        super().__init__(tied=tied)
        for block in self.blocks:
            block.norm = nn.Sequential(block.norm, nn.Dropout(dropout))  # pyright: ignore


class Data:
    """Batches in an order of its own, from any of them on."""

    def __init__(self) -> None:
        self.next = 0

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.next)
        self.next += 1
        tokens = torch.randint(WORDS, (8, LENGTH + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


CUTS = {1: [], 2: ["blocks.2"], 4: ["blocks.1", "blocks.2", "blocks.3"]}
CUTS[8] = [f"blocks.{number}{part}" for number in range(4) for part in (".norm", ".narrow")][1:]
CUTS[6] = CUTS[8][2:]


def mesh_of(group: Any, shape: tuple[int, int] | None) -> DeviceMesh:
    """The ranks of a group as one pipeline, or all processes as a pipeline with copies."""
    if shape is None:
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    return init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))


def pipeline(stages: int, schedule: str = "1f1b", **options: Any) -> tl.Pipeline:
    """Made from other values than those that were saved."""
    model = DropLM(options.pop("dropout", 0.2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(options.get("seed") or 0.1)
    return tl.Pipeline(
        model,
        schedule=schedule,
        microbatches=MICROBATCHES,
        loss_fn=loss_fn,
        cuts=CUTS[stages],
        **options,
    )


class Training:
    """A pipeline or a plain model, and what trains it."""

    def __init__(self, pipe: tl.Pipeline | nn.Module) -> None:
        self.pipe = pipe
        named = list(pipe.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in named if p.dim() > 1]},
            {"params": [p for n, p in named if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=1e-2
        )
        self.schedulers = [
            LinearLR(self.optimizer, total_iters=8),
            MultiStepLR(self.optimizer, [3, 5], gamma=0.5),
        ]
        self.data = Data()

    def step(self) -> float:
        tokens, target = self.data.batch()
        if isinstance(self.pipe, tl.Pipeline):
            loss = self.pipe.step(tokens, target=target)
            self.pipe.clip_grad_norm_(0.5)
        else:
            loss = torch.zeros(())
            for x, y in zip(tokens.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
                part = loss_fn(self.pipe(x), y) / MICROBATCHES
                part.backward()
                loss += part.detach()
            nn.utils.clip_grad_norm_(self.pipe.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()
        return loss.item()

    def run(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    def save(self, folder: Path | str, **options: Any) -> Path:
        assert isinstance(self.pipe, tl.Pipeline)
        return self.pipe.save(
            folder, self.optimizer, scheduler=self.schedulers, data=self.data, **options
        )

    def load(self, folder: Path | str) -> checkpoint.Loaded:
        given: dict[str, Any] = {"scheduler": self.schedulers, "data": self.data}
        if isinstance(self.pipe, tl.Pipeline):
            return self.pipe.load(folder, self.optimizer, **given)
        return checkpoint.load_into(self.pipe, self.optimizer, folder, **given)

    def state(self) -> Iterator[Tensor]:
        for parameter in self.pipe.parameters():
            yield parameter.detach().clone()
            for value in self.optimizer.state[parameter].values():
                yield value.clone()
