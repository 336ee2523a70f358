"""What `Pipeline` costs in one process: step() over the plain accumulation loop of the same model.

    python benchmarks/pipeline.py                 1, 2 and 4 ranks (about three minutes)
    python benchmarks/pipeline.py --ranks 4 --device cuda

The plain loop runs forward, loss and backward of the whole model for each micro-batch. Both take
turns, and each turn of step() is divided by that of the loop beside it; what is printed is the
median and the quartiles. A model is cut by hand, and as `Pipeline` cuts it by itself.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

import taktline as tl

MICROBATCHES = 8
CUTS = ("by hand", "by itself")
SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "zbv": 2, "dualpipev": 2}
"""Each schedule, and the stages a rank that it is measured with."""


class Job(NamedTuple):
    """What is trained, the batch and target of a step, and how many steps are timed in one go."""

    model: nn.Module
    stages: Sequence[nn.Module]
    """The model in eight pieces, to be cut by hand; none for a model that is cut by itself only."""
    batch: torch.Tensor
    target: torch.Tensor
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    steps: int


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.layers_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.attention_norm(x)).chunk(3, -1)
        query, key, value = (p.unflatten(-1, (-1, 64)).transpose(1, 2) for p in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.layers_norm(x))))


class GPT(nn.Module):
    """A GPT, whose forward is written as people write it."""

    def __init__(self, width: int, layers: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def chain(width: int, rows: int, steps: int, device: str) -> Job:
    """Linear layers, one after the other."""
    stages = [nn.Sequential(nn.Linear(width, width), nn.Tanh()).to(device) for _ in range(8)]
    batch = torch.randn(rows * MICROBATCHES, width, device=device)
    return Job(nn.Sequential(*stages), stages, batch, batch, functional.mse_loss, steps)


def gpt(width: int, layers: int, words: int, length: int, steps: int, device: str) -> Job:
    """A GPT in bfloat16, with two texts a micro-batch."""
    with torch.device(device):
        model = GPT(width, layers, words, length).bfloat16()
        text = torch.randint(words, (2 * MICROBATCHES, length + 1))
    return Job(model, [], text[:, :-1], text[:, 1:].contiguous(), surprise, steps)


def surprise(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of a GPT."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


JOBS: dict[str, dict[str, Callable[[], Job]]] = {
    "cpu": {
        "tiny": partial(chain, 16, 4, 4, "cpu"),
        "medium": partial(chain, 768, 32, 1, "cpu"),
    },
    "cuda": {
        "tiny": partial(chain, 64, 4, 4, "cuda"),
        "GPT 40M": partial(gpt, 512, 8, 16384, 128, 4, "cuda"),
        "GPT 1.2B": partial(gpt, 2048, 22, 32768, 1024, 1, "cuda"),
    },
}


def loop(job: Job) -> Callable[[], object]:
    """Plain accumulation over the micro-batches."""
    parts = [x.tensor_split(MICROBATCHES) for x in (job.batch, job.target)]

    def step() -> None:
        for part, target in zip(*parts, strict=True):
            (job.loss_fn(job.model(part), target) / MICROBATCHES).backward()

    return step


def pipeline(job: Job, cut: str, schedule: str, ranks: int) -> Callable[[], object]:
    """A step of the same on some ranks."""
    model = job.model
    if cut == "by hand":
        each = len(job.stages) // (ranks * SCHEDULES[schedule])
        firsts = range(0, len(job.stages), each)
        model = [nn.Sequential(*job.stages[first : first + each]) for first in firsts]
    pipe = tl.Pipeline(
        model,
        example=(job.batch.tensor_split(MICROBATCHES)[0],),
        schedule=schedule,
        microbatches=MICROBATCHES,
        stages_per_rank=SCHEDULES[schedule],
        loss_fn=job.loss_fn,
        ranks=ranks,
    )
    return lambda: pipe.step(job.batch, target=job.target)


def ratios(
    plain: Callable[[], object], steps: Sequence[Callable[[], object]], count: int, seconds: float
) -> list[list[float]]:
    """What so many of each step take over what the loop takes beside them; 9 times or more.

    All take turns, so that a while in which the host is slow is no single one's.
    """
    found: list[list[float]] = [[] for _ in steps]
    gc.collect()
    gc.disable()  # as timeit does: nobody pays for what others have left lying about
    for step in (plain, *steps):
        timed(step, 3)  # shapes are learned, memory is taken
    ends = time.perf_counter() + seconds
    while len(found[0]) < 9 or time.perf_counter() < ends:
        for step, taken in zip(steps, found, strict=True):
            if len(taken) % 2:  # whoever goes first finds what others have left in the caches
                piped = timed(step, count)
                taken.append(piped / timed(plain, count))
            else:
                bare = timed(plain, count)
                taken.append(timed(step, count) / bare)
    gc.enable()
    return found


def timed(call: Callable[[], object], steps: int) -> float:
    """How long some calls take, and all that they have begun on a GPU."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        call()
    wait()
    return time.perf_counter() - start


def main(
    ranks: list[int], schedules: list[str], jobs: list[str], seconds: float, device: str
) -> None:
    """Print a table for each job, with a line for each number of ranks and schedule."""
    for name in jobs:
        job = JOBS[device][name]()
        cuts = CUTS if job.stages else CUTS[1:]
        rows = [(count, schedule) for count in ranks for schedule in schedules]
        steps = [pipeline(job, cut, schedule, n) for n, schedule in rows for cut in cuts]
        found = iter(ratios(loop(job), steps, job.steps, seconds))
        print(f"{'ranks':>5}  {'schedule':18}" + "".join(f"{f'{name}, {c}':24}" for c in cuts))
        for count, schedule in rows:
            told = (quartiles(next(found)) for _ in cuts)
            print(f"{count:>5}  {schedule:18}" + "".join(f"{each:24}" for each in told))


def quartiles(found: list[float]) -> str:
    """The median, and between what half of them are."""
    low, middle, high = statistics.quantiles(found, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--jobs", nargs="+", default=[])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each table, at least")
    parser.add_argument("--device", default="cpu", choices=list(JOBS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names = options.jobs or list(JOBS[options.device])
    main(options.ranks, options.schedules, names, options.seconds, options.device)
