"""One architecture on one pipeline for a step, against the plain model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import taktline as tl
from tests.zoo.architecture import Architecture, loss_of

__all__ = ["PLACES", "Found", "compare", "plain", "train"]

ROWS, PARTS = 8, 4
PLACES = [("1f1b", 2), ("1f1b", 4), ("zbv", 2), ("zbv", 4)]
"""Schedules, with how many ranks they run on."""


@dataclass(frozen=True)
class Found:
    """What a step has shown: its loss, gradients and buffers, by their names in the model."""

    loss: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def plain(architecture: Architecture) -> Found:
    """The model by itself, micro-batch after micro-batch."""
    model = architecture.make()
    args, kwargs = architecture.call(ROWS)
    total = 0.0
    for part in range(PARTS):
        mine = pytree.tree_map_only(Tensor, lambda whole, part=part: _cut(whole, part), (args, kwargs))
        with tl.collect_losses() as added:
            loss = loss_of(model(*mine[0], **mine[1]), _target()[:2])
        (sum(added, start=loss) / PARTS).backward()
        total += loss.item() / PARTS
    return Found(total, _gradients(model.named_parameters()), dict(model.named_buffers()))


def _cut(whole: Tensor, part: int) -> Tensor:
    size = ROWS // PARTS
    return whole[part * size : (part + 1) * size] if len(whole) == ROWS else whole


def _target() -> Tensor:
    return torch.ones(ROWS)


def train(architecture: Architecture, schedule: str, ranks: int, **options: Any) -> Found:
    """A step on a pipeline; over processes, what this one has."""
    args, kwargs = architecture.call(ROWS)
    example = architecture.call(ROWS // PARTS)
    model = architecture.make()
    with tl.Pipeline(
        model,
        example=example,
        schedule=schedule,
        microbatches=PARTS,
        loss_fn=loss_of,
        ranks=ranks,
        **(architecture.options or {}),
        **options,
    ) as pipe:
        loss = pipe.step(*args, target=_target(), **kwargs)
        return Found(loss.item(), _gradients(pipe.named_parameters()), _buffers(pipe))


def _buffers(pipe: tl.Pipeline) -> dict[str, Tensor]:
    return {name: b for module in pipe.stages.values() for name, b in module.named_buffers()}


def _gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in parameters}


def compare(found: Found, expected: Found, *, whole: bool = True) -> None:
    """Raise unless a pipeline has shown the same; ``whole`` is whether it has all parameters."""
    if abs(found.loss - expected.loss) > 1e-4 * max(1.0, abs(expected.loss)):
        raise AssertionError(f"the loss is {found.loss}, not {expected.loss}")
    if whole and (missing := expected.gradients.keys() - found.gradients.keys()):
        raise AssertionError(f"no gradient of {sorted(missing)[:3]}")
    for name, gradient in found.gradients.items():
        right = expected.gradients[name]
        if (off := (gradient - right).abs().max().item()) > 1e-3 * right.abs().max().item() + 1e-6:
            raise AssertionError(f"the gradient of {name} is off by {off:.3g} of {right.abs().max():.3g}")
