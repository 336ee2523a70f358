"""Plans that are found for measured costs, beside the schedules of the same memory and the bound.

    python benchmarks/planner.py                 the table, unit costs, random costs and large plans
    python benchmarks/planner.py table large     only these
    python benchmarks/planner.py --seconds 20    with so many for each plan of the table
    python benchmarks/planner.py --random 1000   with so many random sets of costs
    python benchmarks/planner.py --only v        only rows of the table with this in their name

Memory is in whole micro-batches: two chunks in a V. All bubbles are those of the longest rank's own
span. Costs are those of the paper on Zero Bubble schedules (arXiv 2401.10241): its model of 1.5B
parameters, of whose activations W needs 37% in the linear rows but two, and those of 6.2B, in
halves. ``goal`` is what others have reached.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import taktline as tl
from taktline.plan import peak_memory
from taktline.plan.portfolio import fitting
from taktline.plan.solver import installed
from taktline.plan.work import Work

_TIMES: dict[str, Any] = {"forward": 18.522, "backward_input": 18.086, "backward_weight": 9.337}
_LINK = tl.Link(latency=0.601)
_PART = 32 * 2304 / (34 * 2304 + 5 * 24 * 1024)
LINEAR = tl.Costs(**_TIMES, link=_LINK, kept_for_weight=_PART)
WHOLE = tl.Costs(**_TIMES, link=_LINK)
_HALF: dict[str, Any] = {name: t / 2 for name, t in _TIMES.items()}
HALVES = tl.Costs(**_HALF, link=_LINK)
LARGER = tl.Costs(
    forward=14.859, backward_input=14.722, backward_weight=9.964, link=tl.Link(latency=0.527)
)
LARGER_16 = tl.Costs(
    forward=14.407, backward_input=14.380, backward_weight=9.676, link=tl.Link(latency=1.61)
)


PARTS = ("table", "unit", "random", "large")


class Row(NamedTuple):
    """A plan to find."""

    name: str
    costs: tl.Costs
    placement: Any
    ranks: int
    microbatches: int
    memory: float
    goal: float | None


ROWS = [
    Row("1.5B linear", LINEAR, "linear", 8, 24, 8, 0.1585),
    Row("1.5B linear", LINEAR, "linear", 8, 24, 12, 0.0719),
    Row("1.5B linear", LINEAR, "linear", 8, 24, 16, 0.0433),
    Row("1.5B linear", LINEAR, "linear", 8, 64, 16, 0.0018),
    Row("1.5B linear, W keeps all", WHOLE, "linear", 8, 24, 12, None),
    Row("1.5B linear, W keeps all", WHOLE, "linear", 8, 24, 16, None),
    Row("1.5B v", HALVES, "v", 8, 24, 8, 0.0703),
    Row("1.5B v", HALVES, "v", 8, 24, 5, 0.170),
    Row("1.5B v", HALVES, "v", 8, 64, 5, 0.071),
    Row("1.5B v", HALVES, "v", 8, 24, 4, 0.313),
    Row("6.2B v", LARGER, "v", 8, 24, 5, 0.165),
    Row("6.2B v", LARGER, "v", 8, 24, 8, 0.0446),
    Row("6.2B v", LARGER_16, "v", 16, 48, 10, 0.200),
]


def table(only: str, seconds: float) -> None:
    print(f"{'':26} {'p':>3} {'m':>3} {'memory':>6} {'named':>7} {'goal':>7}", end="")
    print(f" {'found':>7} {'s':>5} {'solver':>7} {'s':>5} {'bound':>7}")
    for row in ROWS:
        if only in row.name:
            _line(row, seconds)


def _line(row: Row, seconds: float) -> None:
    given: dict[str, Any] = {
        "ranks": row.ranks,
        "microbatches": row.microbatches,
        "memory": row.memory,
        "placement": row.placement,
    }
    found: list[str] = []
    for solver in (False, True):
        if solver and not installed():
            found += ["–", "–"]
            continue
        begin = time.perf_counter()
        plan = tl.optimise(row.costs, **given, seconds=seconds, solver=solver)
        took = time.perf_counter() - begin
        assert tl.validate(plan) == ()
        assert peak_memory(plan, row.costs).max() <= row.memory + 1e-9
        found += [f"{tl.simulate(plan, row.costs).bubble('span'):.2%}", f"{took:.1f}"]
    best = named(row.costs, plan.placement, row.microbatches, row.memory)
    least = tl.bound(row.costs, **given).bubble
    goal = "–" if row.goal is None else f"{row.goal:.2%}"
    print(
        f"{row.name:26} {row.ranks:>3} {row.microbatches:>3} {row.memory:>6g} "
        f"{'none' if best is None else f'{best:.2%}':>7} {goal:>7} {found[0]:>7} {found[1]:>5} "
        f"{found[2]:>7} {found[3]:>5} {least:>7.2%}",
        flush=True,
    )


def named(
    costs: tl.Costs, placement: tl.Placement, microbatches: int, memory: float
) -> float | None:
    """The bubble of the best schedule that fits."""
    work = Work.of(costs, placement, microbatches, [memory] * placement.ranks)
    plans = fitting(work, costs)
    return min((tl.simulate(plan, costs).bubble("span") for plan in plans), default=None)


def unit_costs(seconds: float) -> None:
    """Idle units, beside those of the search of arXiv 2405.15362."""
    facts = Path(__file__).parent.parent / "tests" / "plan" / "facts" / "v_schedules_unit_cost.csv"
    print("\nunit costs, in a V: ranks, micro-batches, memory; idle published and found")
    for row in csv.DictReader(facts.read_text("utf-8").splitlines()):
        ranks, microbatches, chunks, idle = map(int, row.values())
        plan = tl.optimise(
            tl.Costs(),
            ranks=ranks,
            microbatches=microbatches,
            memory=chunks / 2,
            placement="v",
            seconds=seconds,
            rounds=200_000,
            solver=False,
        )
        found = tl.simulate(plan).idle("span")
        print(f"  {ranks} {microbatches:>2} {chunks / 2:g}   {idle:>2} {found:>4g}", flush=True)


def random_costs(count: int, rounds: int) -> None:
    """Stages that differ by up to 3×, links of up to one F: no schedule that fits is better."""
    draw, worse, gained = random.Random(0), 0, []
    for number in range(count):
        ranks, microbatches = draw.randint(2, 6), draw.randint(2, 16)
        shape = draw.choice(("linear", "v", "looped"))
        stages = ranks if shape == "linear" else 2 * ranks

        def column(of: int = stages) -> tuple[float, ...]:
            return tuple(draw.uniform(1.0, 3.0) for _ in range(of))

        costs = tl.Costs(
            forward=column(),
            backward_input=column(),
            backward_weight=column(),
            link=tl.Link(latency=draw.uniform(0.0, 2.0)),
        )
        memory = draw.randint(1, 2 * ranks)
        plan = tl.optimise(
            costs,
            ranks=ranks,
            microbatches=microbatches,
            memory=memory,
            placement=shape,
            rounds=rounds,
            seed=number,
            solver=False,
        )
        best = named(costs, plan.placement, microbatches, memory)
        if best is not None:
            found = tl.simulate(plan, costs).bubble("span")
            if found > best + 1e-6:
                worse += 1
                print(f"  {found:.4%} found, {best:.4%} named: {number}, {shape}, {costs}")
            gained.append(best - found)
    mean = sum(gained) / max(1, len(gained))
    print(f"\n{count} random sets of costs: worse than a schedule that fits in {worse}, ", end="")
    print(f"{100 * mean:.1f} points less bubble on average of {len(gained)}", flush=True)


def large() -> None:
    print()
    for ranks, microbatches, memory, seconds in ((8, 64, 5, 5), (64, 512, 40, 10)):
        begin = time.perf_counter()
        plan = tl.optimise(
            HALVES,
            ranks=ranks,
            microbatches=microbatches,
            memory=memory,
            placement="v",
            seconds=seconds,
            solver=False,
        )
        took = time.perf_counter() - begin
        bubble = tl.simulate(plan, HALVES).bubble("span")
        print(
            f"{ranks} ranks × 2 stages × {microbatches} micro-batches: {took:.1f} s of {seconds}, "
            f"bubble {bubble:.2%}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each plan")
    parser.add_argument("--random", type=int, default=50, help="sets of random costs")
    parser.add_argument("--rounds", type=int, default=200, help="of the search for each of these")
    parser.add_argument("--only", default="", help="rows of the table with this in their name")
    options = parser.parse_args()
    if "table" in options.parts:
        table(options.only, options.seconds)
    if "unit" in options.parts:
        unit_costs(options.seconds)
    if "random" in options.parts:
        random_costs(options.random, options.rounds)
    if "large" in options.parts:
        large()


if __name__ == "__main__":
    main()
