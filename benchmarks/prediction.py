"""How well costs from traced steps of 1F1B predict the steps of other schedules.

    python benchmarks/prediction.py                                 2 ranks over gloo
    python benchmarks/prediction.py --ranks 4                       4 of them
    python benchmarks/prediction.py --backend nccl --ranks 4        over nccl, on one GPU or several
    python benchmarks/prediction.py --output FOLDER                 all timelines are written there

The model is a chain of twice as many uneven pieces as there are ranks. 1F1B is traced once, with
each piece as an action of its own, and once with both pieces of a rank as one stage; and steps in
which one rank computes at a time show the halves of a backward, and how much ranks slow each other.
Then all schedules take turns. ``measured`` is the median of their steps; ``predicted`` adds what a
step of 1F1B takes beside its prediction, ``plain`` is the ratio without it. ``spread`` is how far
the first and the second half of the turns are apart: the noise floor. Where it is larger than the
limit, nothing can be said.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from _peers import run_ranks
from torch import nn

import taktline as tl
from taktline.plan.io import to_json
from taktline.plan.sharing import predict
from taktline.plan.units import Units, contiguous, measured, one_by_one, with_overhead
from taktline.train.ranks import Ranks, find_ranks
from taktline.train.trial import Batches, scheduled, traced, waited

SCHEDULES = {
    "1f1b": 1,
    "gpipe": 1,
    "zb_h1": 1,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
}
"""1F1B and six others, with the stages of a rank."""
SIZES = {"gloo": (384, 32, 1), "nccl": (2048, 512, 2)}
"""How wide pieces are, the rows of a micro-batch, and how many blocks a piece has at least."""
MICROBATCHES = 8
LIMIT = 0.05
"""The error that is the goal."""


class Model:
    """The pieces of the chain, each made when a rank first needs it."""

    def __init__(self, count: int, backend: str) -> None:
        self.width, self.rows, self.blocks = SIZES[backend]
        self.device = torch.empty(0, device="cuda" if backend == "nccl" else "cpu").device
        self.count = count
        self._made: dict[int, nn.Module] = {}

    def piece(self, at: int) -> nn.Module:
        """Some blocks of two layers; more of them in every other pair of pieces."""
        if at not in self._made:
            torch.manual_seed(at)
            blocks = [self._block() for _ in range(self.blocks + (at // 2 + at) % 2)]
            self._made[at] = nn.Sequential(*blocks).to(self.device)
        return self._made[at]

    def stages(self, bounds: tuple[int, ...], plan: tl.Plan, rank: int) -> dict[int, nn.Module]:
        """The stages of a rank."""
        return {
            stage: nn.Sequential(*map(self.piece, range(bounds[stage], bounds[stage + 1])))
            for stage in plan.placement.stages_of(rank)
        }

    def _block(self) -> nn.Module:
        wide = nn.Linear(self.width, 4 * self.width), nn.Linear(4 * self.width, self.width)
        return nn.Sequential(wide[0], nn.GELU(), wide[1])


def batches(model: Model) -> Batches:
    """The micro-batches of a step."""
    torch.manual_seed(0)  # the same on all ranks
    example = torch.randn(model.rows, model.width, device=model.device)
    each = [(example,)] * MICROBATCHES, [{}] * MICROBATCHES, [example] * MICROBATCHES
    return Batches(*each, nn.functional.mse_loss)


def measure(rank: int, count: int, backend: str, turns: int, seconds: float, output: str) -> None:
    """Print a line for each schedule."""
    model = Model(2 * count, backend)
    options: dict[str, Any] = {"device": model.device, "default": 1, "timeout": None}
    ranks = find_ranks(None, None, None, **options)
    data = batches(model)
    bounds = tuple(range(0, 2 * count + 1, 2))
    single = tuple(range(2 * count + 1))
    fine = contiguous(count, bounds, MICROBATCHES)
    pieces = model.stages(single, fine, rank)
    alone = traced(pieces, one_by_one(fine.placement, 4), ranks, data)
    together = traced(pieces, fine, ranks, data)
    plain = tl.build("1f1b", ranks=count, microbatches=MICROBATCHES)
    whole = traced(model.stages(bounds, plain, rank), plain, ranks, data)
    units = with_overhead(measured(alone, together), whole, bounds)
    size = 4.0 * model.rows * model.width
    units = replace(units, sizes=np.array([[0.0], [0.0], [size]]))
    saved = {"alone": alone, "together": together, "whole": whole}
    predictions: dict[str, float] = {}
    steps: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:
        for name, each in SCHEDULES.items():
            plan = tl.build(name, ranks=count, microbatches=MICROBATCHES, stages_per_rank=each)
            cuts = bounds if each == 1 else single
            known = units.costs(cuts, plan.placement)
            timeline = predict(plan, known, units.cores, spinning=units.spinning)
            predictions[name] = timeline.makespan
            made = scheduled(model.stages(cuts, plan, rank), plan, ranks, data)
            schedule, steps[name] = stack.enter_context(made)
            if output:
                with schedule.trace() as trace:
                    steps[name]()
                saved[name] = trace.timelines
        times = in_turns(steps, ranks, turns, seconds)
    if rank == 0:
        if output:
            write(Path(output), saved, times)
        show_units(units, count)
        show(predictions, times)


def in_turns(
    steps: dict[str, Callable[[], object]], ranks: Ranks, turns: int, seconds: float
) -> dict[str, list[float]]:
    """The milliseconds of steps that take turns, so that a slow while is no single one's."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    begin = time.perf_counter()
    for turn in range(turns):
        for name, step in steps.items():
            found[name].append(waited(step, ranks))
        late = turn >= 5 and time.perf_counter() - begin > seconds
        if any(each for (each,) in ranks.transport.exchange([late], "whether to go on")):
            break
    return found


def write(folder: Path, saved: dict[str, list[tl.Timeline]], times: dict[str, list[float]]) -> None:
    """Plans, the start, end and arrival of each of their rows, and the times of all steps."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {f"{name}/steps": np.array(took) for name, took in times.items()}
    for name, timelines in saved.items():
        for at, each in enumerate(timelines):
            arrays[f"{name}/{at}"] = np.stack([each.start, each.end, each.arrivals])
    np.savez_compressed(folder / "timelines.npz", **arrays)  # pyright: ignore
    plans = {name: to_json(timelines[0].plan) for name, timelines in saved.items()}
    (folder / "plans.json").write_text(json.dumps(plans))


def show_units(units: Units, ranks: int) -> None:
    """What was measured, and how ranks slow each other."""
    shared = "as many cores as ranks" if units.cores >= ranks else f"{units.cores:.2f} cores"
    print("waits spin: all ranks share a GPU" if units.spinning else f"waits sleep; {shared}")
    print(f"a message keeps its sender {units.send:.3f} ms, and arrives after {units.flight:.3f}")
    for kind, row, overhead in zip("FBIW", units.times, units.overhead, strict=True):
        print(f"{kind} of each piece", *(f"{each:7.3f}" for each in row), f" beside {overhead:.3f}")


def show(predictions: dict[str, float], times: dict[str, list[float]]) -> None:
    """A line for each schedule, the median error, and the noise floor."""
    beside = median(times["1f1b"]) - predictions["1f1b"]
    print(f"a step of 1F1B takes {beside:.2f} ms beside its prediction, which all get")
    print(f"{'':24}{'measured':>10}{'predicted':>11}{'ratio':>8}{'plain':>8}{'spread':>8}")
    errors: list[float] = []
    spreads: list[float] = []
    for name, took in times.items():
        middle = median(took)
        ratio = (predictions[name] + beside) / middle
        halves = [median(took[at::2]) for at in (0, 1)]
        apart = [median(took[: len(took) // 2]), median(took[len(took) // 2 :])]
        spread = max(abs(a - b) / middle for a, b in (halves, apart))
        spreads.append(spread)
        if name != "1f1b":
            errors.append(abs(ratio - 1))
        plain = predictions[name] / middle
        print(f"{name:24}{middle:10.2f}{ratio * middle:11.2f}{ratio:8.3f}{plain:8.3f}{spread:8.1%}")
    noise = median(spreads)
    print(
        f"median error {median(errors):.1%}, largest {max(errors):.1%}, {len(errors)} schedules; "
        f"noise floor {noise:.1%}, largest {max(spreads):.1%}; {len(times['1f1b'])} steps each"
    )
    if noise > LIMIT:
        print(f"this machine is too noisy to say: its noise is more than {LIMIT:.0%}")
    else:
        print(f"within {LIMIT:.0%}: {sum(each <= LIMIT for each in errors)} of {len(errors)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=list(SIZES), default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0, help="of all turns, about")
    parser.add_argument("--output", default="", help="a folder for all timelines")
    given = parser.parse_args()
    print(f"ms per step; {given.ranks} ranks over {given.backend}, {MICROBATCHES} micro-batches")
    begin = time.perf_counter()
    options = given.backend, given.turns, given.seconds, given.output
    run_ranks(measure, given.ranks, *options, backend=given.backend)
    print(f"all took {time.perf_counter() - begin:.0f} s")
