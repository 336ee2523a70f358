"""What a stage that was cut by name costs beside its layers: its forward less that of bare layers.

    python benchmarks/by_name.py                  about ten seconds

A stage in the middle of a model, with so many layers before it and so many of its own, tiny ones.
The models differ in what their forward does: nothing of its own, or something before its layers.
Both take turns; medians of the rounds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import taktline as tl

WIDTH, CALLS = 16, 20
SIZES = ((1, 1), (1, 8), (8, 4), (60, 4), (250, 4))
"""Layers before the stage, and in it."""


class Loop(nn.Module):
    """Layers, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Positions(Loop):
    """Computes something by itself before its layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + torch.arange(x.shape[-1], device=x.device)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def sequential(count: int) -> nn.Module:
    """A chain of layers."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def measure(make: Callable[[int], nn.Module], before: int, own: int, rounds: int) -> list[float]:
    """Microseconds of bare layers, and of the stage that has them."""
    model, x = make(before + own + 1), torch.randn(2, WIDTH)
    path = "" if isinstance(model, nn.Sequential) else "layers."
    cuts = [f"{path}{before}", f"{path}{before + own}"]
    pieces = tl.split.by_names(model, cuts, example=(x,))
    layers = [model.get_submodule(f"{path}{before + place}") for place in range(own)]
    given: Any = pieces[0](x)
    given = given if isinstance(given, tuple) else (given,)
    came = torch.randn(2, WIDTH, requires_grad=True)

    def bare() -> None:
        value = came
        for layer in layers:
            value = layer(value)

    calls = (bare, lambda: pieces[1](*given))
    times: tuple[list[float], ...] = ([], [])
    gc.disable()
    for _ in range(rounds):
        for call, taken in zip(calls, times, strict=True):
            call()  # warms up; the first one learns
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            taken.append((time.perf_counter() - start) / CALLS * 1e6)
    gc.enable()
    return [statistics.median(taken) for taken in times]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=51)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"µs of one forward; {options.rounds} rounds")
    for name, make in (
        ("nn.Sequential", sequential),
        ("a loop", Loop),
        ("positions, a loop", Positions),
    ):
        for before, own in SIZES:
            layers, stage = measure(make, before, own, options.rounds)
            print(
                f"{name:18} {before:3} layers before, {own} own   bare {layers:6.1f}   "
                f"stage {stage:6.1f}   above {stage - layers:6.1f}",
                flush=True,
            )
