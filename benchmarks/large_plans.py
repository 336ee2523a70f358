"""What to expect of pipelines on many ranks: bubbles, memory, and what planning them takes.

    python benchmarks/large_plans.py                       up to 1,024 ranks (two minutes)
    python benchmarks/large_plans.py --ranks 256 1024      others; or --microbatches, --stages

A rank's share of a forward takes 20 ms, that of a backward 40 ms, and a message 32 MiB, between 8
ranks of a host at 200 GB/s and 2 µs, and between hosts at 25 GB/s and 10 µs on a rail. Then one
cable between two hosts has a tenth of the bandwidth. Each plan is made in a process of its own;
``took`` and ``memory`` are what that took there, on one core: to build, validate and simulate
it without links.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from typing import Any

import taktline.plan as tp

SCHEDULES = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble")
FAST = tp.Links(
    ranks_per_host=8,
    within=tp.Link(latency=0.002, bandwidth=200e6),
    across=tp.Link(latency=0.01, bandwidth=25e6),
)
"""In milliseconds and bytes."""


def costs(ranks: int, per_rank: int, links: tp.Link | tp.Links) -> tp.Costs:
    """A rank's share of the work, cut into its stages."""
    whole = {"forward": 20.0, "backward_input": 20.0, "backward_weight": 20.0}
    times: Any = {name: time / per_rank for name, time in whole.items()}
    return tp.Costs(**times, link=links, message_bytes=2.0**25, unit="ms")


def slow_cable(ranks: int) -> tp.Links:
    """The same links, one of which, in the middle, has a tenth of the bandwidth."""
    last = ranks // 2 - ranks // 2 % FAST.ranks_per_host - 1
    slow = tp.Link(latency=0.01, bandwidth=2.5e6)
    return tp.Links(
        ranks_per_host=FAST.ranks_per_host,
        within=FAST.within,
        across=FAST.across,
        pairs={(last, last + 1): slow},
    )


def measure(name: str, ranks: int, per_rank: int, microbatches: int, results: Any) -> None:
    """One row of the table."""
    began = time.process_time()
    plan = tp.build(name, ranks=ranks, stages_per_rank=per_rank, microbatches=microbatches)
    ideal = tp.simulate(plan, costs(ranks, per_rank, tp.Link()))
    row = [name, f"{ranks:,} × {per_rank} × {microbatches:,}", f"{len(plan):,}"]
    row += [f"{1e-3 * ideal.makespan:.1f} s", f"{ideal.bubble():.1%}"]
    peak = f"{ideal.peak_memory.max():g}"
    took = time.process_time() - began
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    del ideal
    for links in (FAST, slow_cable(ranks)):
        row.append(f"{tp.simulate(plan, costs(ranks, per_rank, links)).bubble():.1%}")
    results.put([*row, peak, f"{took:.0f} s", f"{gigabytes:.1f} GB"])
    with_links = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{name}: {time.process_time() - began:.0f} s, {with_links:.1f} GB with all links")


def main() -> None:
    """Print the table of the page docs/scale.md."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=SCHEDULES, help="names of schedules")
    parser.add_argument("--microbatches", type=int, help="by default 4 for each rank")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    head = "schedule | ranks × stages × micro-batches | actions | step | bubble | with links"
    lines = [f"| {head} | with a slow cable | activations | took | memory |"]
    lines.append("| --- |" + " ---: |" * 9)
    for ranks in given.ranks:
        for name in given.only:
            results = context.SimpleQueue()
            per_rank = 1 if name == "1f1b" else given.stages
            numbers = (name, ranks, per_rank, given.microbatches or 4 * ranks, results)
            process = context.Process(target=measure, args=numbers)
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{name} on {ranks} ranks ended with {process.exitcode}")
            lines.append(f"| {' | '.join(results.get())} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
