"""``schedule="auto"`` beside every named schedule, on a GPT with a large embedding and head.

    python benchmarks/auto.py                                 2 ranks over gloo
    python benchmarks/auto.py --backend nccl --ranks 4        over nccl, on one GPU or several

All pipelines have the same model, batch and ranks; named ones are cut by counted operations. They
take turns, so that a slow while is no single one's; those far behind the quickest, only two of
them. What is printed is the median of the steps, and how far both halves of them are apart: the
noise.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import time
from statistics import median
from typing import Any

import torch
from _peers import run_ranks
from pipeline import GPT, surprise
from torch.distributed.device_mesh import init_device_mesh

import taktline as tl
from taktline.errors import TaktlineError
from taktline.plan import names
from taktline.train.trial import waited

SIZES = {
    "gloo": {"width": 128, "layers": 4, "words": 4_000, "length": 32},
    "nccl": {"width": 1024, "layers": 12, "words": 65_536, "length": 384},
}
ROWS = 2
"""Texts in a micro-batch."""


def measure(rank: int, count: int, backend: str, microbatches: int, seconds: float) -> None:
    """Print a line for each schedule, the quickest first."""
    device = torch.empty(0, device="cuda" if backend == "nccl" else "cpu").device
    mesh = init_device_mesh(device.type, (count,), mesh_dim_names=("pp",))
    sizes = SIZES[backend]
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS * microbatches, sizes["length"] + 1)
    text = torch.randint(sizes["words"], shape, generator=generator).to(device)
    batch, target = text[:, :-1], text[:, 1:].contiguous()
    usual: dict[str, Any] = {
        "example": (batch[:ROWS],),
        "microbatches": microbatches,
        "loss_fn": surprise,
        "mesh": mesh,
        "device": device,
    }
    begin = time.perf_counter()
    torch.manual_seed(0)
    model = GPT(**sizes)
    auto = tl.Pipeline(copy.deepcopy(model), schedule="auto", example_target=target[:ROWS], **usual)
    pipes = {"auto": auto}
    if rank == 0:
        print(f"{auto._built.choice}\nchosen in {time.perf_counter() - begin:.0f} s\n")
    for name in names():
        if name != "forward_only":
            try:
                pipes[name] = tl.Pipeline(copy.deepcopy(model), schedule=name, **usual)
            except TaktlineError as error:
                if rank == 0:
                    print(f"{name}: {error}")
    ranks = auto._built.ranks
    took: dict[str, list[float]] = {name: [] for name in pipes}
    gc.collect()
    gc.disable()
    ends, near = time.perf_counter() + seconds, list(pipes)
    for turn in range(100):
        for name in near:
            pipe = pipes[name]
            took[name].append(waited(lambda p=pipe: p.step(batch, target=target), ranks))
        limit = _FAR * min(took[name][-1] for name in near) if turn else math.inf
        kept = [took[name][-1] <= limit or name in ("auto", "1f1b") for name in near]
        late = turn >= 5 and time.perf_counter() > ends
        stop, *kept = ranks.transport.exchange([late, *kept], "whether to go on")[0]
        near = [name for name, keep in zip(near, kept, strict=True) if keep]
        if stop:
            break
    if rank == 0:
        show({name: each[1:] for name, each in took.items()}, pipes)  # the first one warms up
        print(f"all took {time.perf_counter() - begin:.0f} s")


def show(took: dict[str, list[float]], pipes: dict[str, tl.Pipeline]) -> None:
    """A line for each, and how far ``auto`` is from the best and from 1F1B."""
    steps = {name: median(each) for name, each in took.items()}
    least = min(steps.values())
    spreads: list[float] = []
    for name, step in sorted(steps.items(), key=lambda each: each[1]):
        halves = [median(took[name][at::2] or [step]) for at in (0, 1)]
        spreads.append(abs(halves[0] - halves[1]) / step)
        plan = pipes[name].plan
        said = f"{plan.name}, {plan.placement}" if name == "auto" else ""
        print(f"{name:24}{step:10.2f} ms{step / least:8.3f}  ± {spreads[-1]:.1%}  {said}")
    named = {name: step for name, step in steps.items() if name != "auto"}
    best = min(named, key=lambda name: named[name])
    print(
        f"auto over the best named one ({best}): {steps['auto'] / named[best]:.3f}; over 1f1b: "
        f"{steps['auto'] / steps['1f1b']:.3f}; noise {median(spreads):.1%}, "
        f"{len(took['auto'])} steps each"
    )
    if median(spreads) > _TOO_MUCH:
        print(f"this machine is too noisy to say: its noise is more than {_TOO_MUCH:.0%}")


_TOO_MUCH, _FAR = 0.02, 1.3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=list(SIZES), default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="of all turns, about")
    given = parser.parse_args()
    print(
        f"ms per step; {given.ranks} ranks over {given.backend}, {given.microbatches} micro-batches"
    )
    run_ranks(
        measure,
        given.ranks,
        given.backend,
        given.microbatches,
        given.seconds,
        backend=given.backend,
    )
