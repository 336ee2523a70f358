"""Planning speed, beside torch in the same run.

    python benchmarks/planning.py            everything (about a minute and a half)
    python benchmarks/planning.py --quick    without the largest sizes

1. Interleaved 1F1B from nothing to a simulated plan. Ours: build, lower, validate and simulate;
   torch's: its order, ``_add_send_recv`` and ``_simulate_comms_compute``.
2. How our time grows with the number of actions.
3. The command ``taktline plan`` on a small plan, against ``import torch``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from _figures import record
from torch.distributed.pipelining import schedules as torch_schedules

import taktline as tl

LARGEST = (64, 4, 512)
"""For which torch is waited."""
SIZES = [(32, 2, 128), (64, 2, 512), (128, 2, 1024), (256, 2, 2048)]


def ours(ranks: int, stages_per_rank: int, microbatches: int) -> dict[str, float]:
    """Seconds for each step; the number of actions under "actions"."""
    marks = [time.perf_counter()]
    plan = tl.build(
        "interleaved_1f1b", ranks=ranks, stages_per_rank=stages_per_rank, microbatches=microbatches
    )
    marks.append(time.perf_counter())
    lowered = tl.lower(plan)
    marks.append(time.perf_counter())
    assert tl.validate(lowered) == ()
    marks.append(time.perf_counter())
    tl.simulate(lowered)
    marks.append(time.perf_counter())
    steps = [after - before for before, after in pairwise(marks)]
    names = ("build", "lower", "validate", "simulate")
    return dict(zip(names, steps, strict=True)) | {"actions": len(lowered)}


def torchs(ranks: int, stages_per_rank: int, microbatches: int) -> dict[str, float]:
    """Seconds for each of torch's steps, on the same shape."""
    schedule: Any = object.__new__(torch_schedules.ScheduleInterleaved1F1B)
    schedule.pp_group_size, schedule.n_local_stages = ranks, stages_per_rank
    schedule._n_microbatches = microbatches
    schedule.microbatches_per_round = microbatches // max(1, microbatches // ranks)
    stages = ranks * stages_per_rank

    def stage_to_rank(stage: int) -> int:
        return stage % ranks

    marks = [time.perf_counter()]
    order = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    marks.append(time.perf_counter())
    lowered = torch_schedules._add_send_recv(order, stage_to_rank, stages)
    marks.append(time.perf_counter())
    torch_schedules._simulate_comms_compute(lowered, stage_to_rank, stages)
    marks.append(time.perf_counter())
    steps = [after - before for before, after in pairwise(marks)]
    return dict(zip(("build", "lower", "simulate"), steps, strict=True))


def total(steps: dict[str, float]) -> float:
    return sum(seconds for name, seconds in steps.items() if name != "actions")


def against_torch(ranks: int, stages_per_rank: int, microbatches: int) -> None:
    print(f"\ninterleaved 1F1B, {ranks} ranks × {stages_per_rank} × {microbatches} micro-batches")
    mine = min((ours(ranks, stages_per_rank, microbatches) for _ in range(3)), key=total)
    peer = torchs(ranks, stages_per_rank, microbatches)
    for name, steps in (("taktline", mine), ("torch", peer)):
        parts = ", ".join(f"{key} {value:.2f}" for key, value in steps.items() if key != "actions")
        print(f"  {name:8} {total(steps):7.2f} s  ({parts})")
    print(f"  ratio    {total(peer) / total(mine):7.1f}")
    if (ranks, stages_per_rank, microbatches) == LARGEST:
        row = {"torch": total(peer), "taktline": total(mine)}
        record("planning", " × ".join(map(str, LARGEST)), row)


def growth(sizes: list[tuple[int, int, int]]) -> None:
    print("\nhow our time grows")
    for size in sizes:
        steps = min((ours(*size) for _ in range(2)), key=total)
        each = 1e6 * total(steps) / steps["actions"]
        shape = " × ".join(map(str, size))
        print(
            f"  {shape:>16}: {int(steps['actions']):>9,} actions, {total(steps):6.2f} s, "
            f"{each:.2f} µs an action"
        )


def start_up() -> None:
    def median(run: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def python(code: str) -> Callable[[], object]:
        return lambda: subprocess.run(
            [sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL
        )

    command = "import sys; sys.argv = 'taktline plan 1f1b -r 4 -m 8'.split()\n"
    plan = median(python(f"{command}from taktline.cli import main; main()"))
    torch = median(python("import torch"))
    print(f"taktline plan 1f1b: {plan:.2f} s, import torch: {torch:.2f} s ({plan / torch:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="leave out the largest sizes")
    quick = parser.parse_args().quick
    start_up()
    growth(SIZES[:2] if quick else SIZES)
    against_torch(*((16, 2, 64) if quick else LARGEST))


if __name__ == "__main__":
    main()
