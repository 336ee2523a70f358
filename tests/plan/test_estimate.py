"""What ranks hold, and cuts that keep within what each of them has."""

from __future__ import annotations

import math
from itertools import combinations
from random import Random
from typing import Any

import numpy as np
import pytest

from taktline.errors import TaktlineError
from taktline.plan import Costs, build, peak_memory
from taktline.plan.candidates import cut
from taktline.plan.estimate import (
    Bytes,
    RankLimit,
    estimate,
    in_flight,
    memory_table,
)
from taktline.plan.units import Units

GIB = 2.0**30


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zbv", "zb_h1", "interleaved_1f1b"])
def test_activations_are_those_of_the_plan(name: str) -> None:
    plan, random = build(name, ranks=3, microbatches=7), Random(name)
    keeps = [random.randint(1, 9) for _ in range(plan.stages)]
    stages = [
        Bytes(weights=8, gradients=4, optimizer=2, activations=each, messages=1) for each in keeps
    ]
    found = estimate(plan, stages)
    known = peak_memory(plan, Costs(activation=tuple(keeps)))
    assert [each.activations for each in found] == known.tolist()
    per_rank = plan.stages // 3
    assert [each.weights for each in found] == [8 * per_rank] * 3


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_the_cut_is_the_best_of_all(name: str) -> None:
    """Of all cuts that keep within the memory, none is quicker."""
    for seed in range(12):
        random = Random(f"{name} {seed}")
        plan = build(name, ranks=2, microbatches=4)
        count = random.randint(plan.stages, 9)
        times = [random.randint(1, 9) for _ in range(count)]
        held = [random.randint(0, 9) for _ in range(count)]
        keeps = [random.randint(0, 3) for _ in range(count)]
        speeds = [1.0, random.choice([1.0, 1.5, 3.0])]
        limits = [float(random.randint(20, 60)), float(random.randint(20, 60))]
        units = Units(np.array([times] * 4, float), np.array([keeps, held, [0] * count], float))
        rank_of, flights = np.array(plan.placement.rank_of), in_flight(plan)

        def scored(bounds: Any, units: Any = units, limits: Any = limits) -> tuple[float, float]:
            parts = [np.add.reduceat(x, bounds[:-1]) for x in (units.times[0], *units.sizes[:2])]
            used = np.bincount(rank_of, parts[2])  # noqa: B023
            for rank, states in enumerate(flights):  # noqa: B023
                used[rank] += (states @ parts[1][rank_of == rank]).max()  # noqa: B023
            busy = np.bincount(rank_of, parts[0]) / speeds  # noqa: B023
            return float(np.maximum(used - limits, 0).max()), float(busy.max())

        inner = combinations(range(1, count), plan.stages - 1)
        best = min(scored((0, *each, count)) for each in inner)
        found = scored(cut(units, plan.placement, limits, speeds, flights))
        if name == "1f1b" or best[0]:
            assert found[0] == best[0] or name == "zbv"
        if not best[0] and not found[0]:
            assert found[1] <= best[1] * (1.0 if name == "1f1b" else 1.25)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([3], r"ranks\[0\] must be a dict such as {\"memory\": \"16GiB\", \"speed\": 1.4}, not 3"),
        ([{"memory": 1e9}, {"size": 3}], r"ranks\[1\] must be a dict"),
        ([{"memory": "16 GIGS"}], "the memory of rank 0, in bytes or as a text like 16GiB, must"),
        ([{"memory": 0}], "the memory of rank 0, .* must be"),
        ([{"speed": 0}], "the speed of rank 0 must be"),
    ],
)
def test_what_ranks_have_is_checked(given: Any, text: str) -> None:
    with pytest.raises(TaktlineError, match=text):
        RankLimit.read(given)


def test_the_table_says_what_is_left() -> None:
    one = Bytes(weights=6 * GIB, gradients=GIB, optimizer=2 * GIB, activations=GIB, messages=0.0)
    limits = [RankLimit(memory=16 * GIB), RankLimit(memory=8 * GIB), RankLimit(memory=math.inf)]
    assert memory_table([one] * 3, limits).splitlines()[1:] == [
        "   0  6.0 GiB    1.0 GiB    2.0 GiB      1.0 GiB       0 B  10.0 GiB  16.0 GiB   6.0 GiB",
        "   1  6.0 GiB    1.0 GiB    2.0 GiB      1.0 GiB       0 B  10.0 GiB   8.0 GiB  -2.0 GiB",
        "   2  6.0 GiB    1.0 GiB    2.0 GiB      1.0 GiB       0 B  10.0 GiB",
    ]
