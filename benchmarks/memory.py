"""Peak memory of 1F1B on two gloo ranks, by the number of micro-batches: torch and Taktline.

    python benchmarks/memory.py [--counts 4 16 64 256]

1F1B has two micro-batches in flight on the first rank and one on the last, however many there are,
so memory should not grow with their number. Each is 2 MiB and ``return_outputs`` is False. Shown is
the peak of resident memory, in MiB above the level before the first step; batch and target, which
do grow, are made before that. A table each for the first step, in which shapes are learned, and for
a later one. Needs Linux.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from _figures import record
from _peers import RUNTIMES, make_schedule, run_ranks
from torch import nn

RANKS, ROWS, WIDTH = 2, 512, 1024
MEASURED = {"first step": 0, "later step": 2}
"""The steps to measure; the one between them lets Taktline bind what it has learned."""

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_PERTURB_": "1"}
"""Has glibc give each tensor pages of its own, and write to all of them: resident is then what is
allocated, neither more (by what was freed before) nor less (by what nobody has touched yet)."""

Cell: TypeAlias = tuple[str, int, int]
"""A runtime, the number of micro-batches, and a rank."""
Peaks: TypeAlias = dict[str, float]
"""MiB, by the name of the step."""


class Scale(nn.Module):
    """Elementwise, to take little time, but it needs its input for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def resident(field: str = "VmRSS") -> float:
    """Resident memory of this process in MiB; ``VmHWM`` is its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status does not tell {field}")


def reset_peak() -> bool:
    """Have the kernel count the peak anew; False where it may not be asked to."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        # Some containers take the order without following it.
        return resident("VmHWM") - resident() < 1
    return False


@contextmanager
def peak(found: Peaks, name: str, level: float) -> Iterator[None]:
    """Note the peak of resident memory, in MiB above a level."""
    if reset_peak():
        yield
        found[name] = resident("VmHWM") - level
        return
    samples, done = [resident()], threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            samples.append(resident())

    thread = threading.Thread(target=sample)
    thread.start()
    yield
    done.set()
    thread.join()
    found[name] = max(samples) - level


def measure(
    rank: int, ranks: int, counts: list[int], results: SimpleQueue[tuple[Cell, Peaks]]
) -> None:
    """Report the peaks of this rank."""
    for runtime in RUNTIMES:  # so that nobody is charged for what torch loads with the first step
        steps(rank, ranks, runtime, ranks)
    for count in counts:
        for runtime in RUNTIMES:
            results.put(((runtime, count, rank), steps(rank, ranks, runtime, count)))


def steps(rank: int, ranks: int, runtime: str, count: int) -> Peaks:
    """The peaks of this rank in some steps of one schedule."""
    schedule, _, first, last = make_schedule(
        RUNTIMES[runtime], "Schedule1F1B", rank, ranks, count, Scale
    )
    batch = torch.ones(count * ROWS, WIDTH)
    args, target = (batch,) if first else (), batch if last else None
    gc.collect()  # what earlier schedules have left would otherwise go during a step
    level, found = resident(), Peaks()
    names = {number: name for name, number in MEASURED.items()}
    for number in range(max(names) + 1):
        dist.barrier()
        with peak(found, names.get(number, ""), level):
            schedule.step(*args, target=target, return_outputs=False)
    return found


def show(name: str, counts: list[int], peaks: dict[Cell, Peaks]) -> None:
    """Print the table of one step."""
    print(f"\n{name:13}{'torch':>18}{'taktline':>18}{'taktline / torch':>18}")
    print(f"{'micro-batches':13}" + f"{'rank 0':>9}{'rank 1':>9}" * 3)
    for count in counts:
        torchs, ours = (
            [peaks[runtime, count, rank][name] for rank in range(RANKS)]
            for runtime in ("torch", "taktline")
        )
        ratios = [a / b for a, b in zip(ours, torchs, strict=True)]
        sizes = "".join(f"{size:9.0f}" for size in (*torchs, *ours))
        print(f"{count:13}{sizes}" + "".join(f"{ratio:9.2f}" for ratio in ratios))
        if name == "later step":
            record("memory", f"{count}", {"torch": torchs[-1], "taktline": ours[-1]})


def main(counts: list[int]) -> None:
    """Print the tables."""
    os.environ.update(MALLOC)  # for the ranks: glibc reads it when a process starts
    results: SimpleQueue[tuple[Cell, Peaks]] = multiprocessing.get_context("spawn").SimpleQueue()
    run_ranks(measure, RANKS, counts, results)
    peaks = dict(results.get() for _ in range(RANKS * len(RUNTIMES) * len(counts)))
    print(f"peak memory of 1F1B on {RANKS} ranks in MiB; micro-batches of 2 MiB")
    for name in MEASURED:
        show(name, counts, peaks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[4, 16, 64, 256])
    main(parser.parse_args().counts)
