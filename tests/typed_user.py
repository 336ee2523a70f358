# pyright: strict
"""A user's program with types: pyright accepts it in a strict project, see test_install.py."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import StageError
from taktline.plan import Costs, Link, Plan, Timeline, peak_memory


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def wanted(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def compare(names: list[str]) -> dict[str, float]:
    costs = Costs(forward=1.0, backward_weight=0.8, link=Link(latency=0.1))
    found: dict[str, float] = {}
    for name in names:
        plan: Plan = tl.build(name, ranks=2, microbatches=4)
        timeline: Timeline = tl.simulate(plan, costs)
        peaks: list[float] = peak_memory(plan).tolist()
        found[name] = timeline.bubble() + max(peaks)
    return found


def train(folder: Path) -> float:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    x = torch.ones(8, 4)
    pipe = tl.Pipeline(
        model,
        example=(x[:2],),
        schedule="1f1b",
        microbatches=4,
        loss_fn=loss_fn,
        ranks=2,
        checkpoint=wanted,
    )
    optimizer = torch.optim.AdamW(pipe.parameters())
    try:
        loss: Tensor = pipe.step(x, target=x)
        norm: Tensor = pipe.clip_grad_norm_(1.0)
    except StageError as error:
        raise SystemExit(str(error)) from error
    optimizer.step()  # pyright: ignore[reportUnknownMemberType]  # of torch, which has no type
    with pipe.trace() as trace:
        pipe.step(x, target=x)
    trace.timeline.save(folder / "step.html")
    state: dict[str, Tensor] = pipe.state_dict()
    numbers: dict[str, float] = pipe.metrics()
    return loss.item() + norm.item() + numbers["step"] + len(state)
