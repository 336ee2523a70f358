"""What `Pipeline` costs in one process: step() over the plain accumulation loop of the same model.

    python benchmarks/pipeline.py                 1, 2 and 4 ranks (about two minutes)
    python benchmarks/pipeline.py --ranks 4 --device cuda

The plain loop runs forward, loss and backward of the whole model for each micro-batch. Both take
turns; what is printed is the median of step() over that of the loop. A model is cut by hand, and as
`Pipeline` cuts it by itself.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

import taktline as tl

LAYERS, MICROBATCHES = 8, 8
SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "zbv": 2, "dualpipev": 2}
"""Each schedule, and the stages a rank that it is measured with."""


class Size(NamedTuple):
    """How wide layers are, the rows of a micro-batch, and how many steps are timed in one go."""

    width: int
    rows: int
    steps: int


SIZES = {
    "cpu": {"tiny": Size(16, 4, 4), "medium": Size(768, 32, 1)},
    "cuda": {"tiny": Size(64, 4, 4), "medium": Size(8192, 1024, 1)},
}
CUTS = ("by hand", "by itself")


def layers(width: int, device: str) -> nn.Sequential:
    """A chain of layers."""
    torch.manual_seed(0)
    chain = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*chain).to(device)


def loop(model: nn.Module, batch: torch.Tensor) -> Callable[[], object]:
    """Plain accumulation over the micro-batches."""

    def step() -> None:
        for part in batch.tensor_split(MICROBATCHES):
            (nn.functional.mse_loss(model(part), part) / MICROBATCHES).backward()

    return step


def pipeline(
    model: nn.Sequential, batch: torch.Tensor, cut: str, schedule: str, ranks: int
) -> Callable[[], object]:
    """A step of the same on some ranks."""
    per_stage = LAYERS // (ranks * SCHEDULES[schedule])
    stages = [model[first : first + per_stage] for first in range(0, LAYERS, per_stage)]
    pipe = tl.Pipeline(
        stages if cut == "by hand" else model,
        example=(batch.tensor_split(MICROBATCHES)[0],),
        schedule=schedule,
        microbatches=MICROBATCHES,
        stages_per_rank=SCHEDULES[schedule],
        loss_fn=nn.functional.mse_loss,
        ranks=ranks,
    )
    return lambda: pipe.step(batch, target=batch)


def ratio(calls: list[Callable[[], object]], steps: int, rounds: int, device: str) -> float:
    """The median time of the second call over that of the first."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: list[list[float]] = [[] for _ in calls]
    gc.collect()
    gc.disable()  # as timeit does: nobody pays for what others have left lying about
    for number in range(rounds + 1):
        for call, found in zip(calls, times, strict=True):
            wait()
            start = time.perf_counter()
            for _ in range(steps):
                call()
            wait()
            if number:  # in the first round, shapes are learned
                found.append(time.perf_counter() - start)
    gc.enable()
    plain, piped = map(statistics.median, times)
    return piped / plain


def main(ranks: list[int], sizes: list[str], rounds: int, device: str) -> None:
    """Print a line for each number of ranks and schedule."""
    heads = [f"{size}, {cut}" for size in sizes for cut in CUTS]
    print(f"{'ranks':>5}  {'schedule':18}" + "".join(f"{head:20}" for head in heads))
    for count in ranks:
        for schedule in SCHEDULES:
            found = []
            for size in sizes:
                width, rows, steps = SIZES[device][size]
                batch = torch.randn(rows * MICROBATCHES, width, device=device)
                for cut in CUTS:
                    model = layers(width, device)
                    calls = [
                        loop(model, batch),
                        pipeline(model, batch, cut, schedule, count),
                    ]
                    found.append(ratio(calls, steps, rounds, device))
            print(f"{count:>5}  {schedule:18}" + "".join(f"{r:<20.2f}" for r in found), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sizes", nargs="+", default=["tiny", "medium"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu", choices=list(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    main(options.ranks, options.sizes, options.rounds, options.device)
