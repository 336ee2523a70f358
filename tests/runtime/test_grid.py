"""Every feature × every schedule × {local ranks, processes}: what the plain model gives."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tests import models
from tests.runtime.features import DYNAMIC, FEATURES, INEXACT, Jump, plain_batch
from tests.runtime.scenarios import (
    SCHEDULES,
    Case,
    Scenario,
    assert_same,
    check_case,
    plan_for,
    run_case,
    run_case_locally,
    run_local,
    run_plain,
    run_stages,
)
from tests.workers import Workers


def run_feature(rank: int, group: Any, name: str, schedule: str, ranks: int, dynamic: bool) -> Any:
    plan = plan_for(schedule, ranks)
    return run_stages(rank, group, FEATURES[name], plan, dynamic_shapes=dynamic)


def check(found: Any, name: str, schedule: str, ranks: int) -> None:
    plain = run_plain(FEATURES[name], plan_for(schedule, ranks))
    assert_same(found, plain, exact=name not in INEXACT)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FEATURES)
def test_local(name: str, schedule: str, ranks: int) -> None:
    plan = plan_for(schedule, ranks)
    found = run_local(FEATURES[name], plan, dynamic_shapes=name in DYNAMIC)
    check(found, name, schedule, ranks)


@pytest.mark.sampled(3)
@pytest.mark.processes
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FEATURES)
def test_processes(workers: Workers, name: str, schedule: str) -> None:
    ranks = 4 if name in ("several", "twice", "loss", "unet", "skip", *DYNAMIC) else 2
    given = name, schedule, ranks, name in DYNAMIC
    check(workers.run(run_feature, *given, ranks=ranks), name, schedule, ranks)


@pytest.mark.processes
@pytest.mark.parametrize("name", FEATURES)
def test_dynamic_shapes(workers: Workers, name: str) -> None:
    """Each message describes itself, in every step."""
    given = name, "ScheduleZBVZeroBubble", 2
    check(workers.run(run_feature, *given, True, ranks=2), *given)


def test_compiled_blocks_with_skips() -> None:
    def compiled(count: int) -> list[nn.Module]:
        stages: list[nn.Module] = [Jump(s, count) for s in range(count)]
        for stage in stages:
            stage.compile(backend="eager")
        return stages

    plan = plan_for("Schedule1F1B", 2)
    found = run_local(Scenario(compiled, plain_batch), plan)
    assert_same(found, run_plain(FEATURES["far skip"], plan))


# The usual models, on the schedules of torch's names.

# Evaluation before, between and after training steps that accumulate; batches of several sizes,
# which are uneven micro-batches for most counts.
CALLS = (("eval", 8), ("step", 8), ("step", 8), ("eval", 9), ("step", 11), ("eval", 8))
RANKS, MICROBATCHES = (1, 2, 4), (1, 3, 8)


def cases(first: int, *, whole: bool) -> list[Any]:
    """Every schedule and model on 1, 2 and 4 ranks; 1, few, odd and many micro-batches.

    Each schedule is always run on so many ranks with one model and one number of micro-batches, all
    of which take turns. The other cases are marked ``matrix``: all of them if ``whole``, or two, so
    that each model and each number has its turn. Another ``first``, other turns.
    """
    found: list[Any] = []
    layouts = [(schedule, n) for schedule, per_rank in SCHEDULES.items() for n in per_rank]
    numbers = product(range(len(layouts)), range(3), range(3), range(3))
    for layout, ranks, model, microbatches in numbers:
        turn = (layout + ranks) % 3, (layout // 3 + 2 * ranks + first) % 3
        schedule, per_rank = layouts[layout]
        sizes = RANKS[ranks], per_rank, MICROBATCHES[microbatches]
        case = Case(schedule, *sizes, models.NAMES[model], CALLS)
        off = (model - turn[0]) % 3, (microbatches - turn[1]) % 3
        if whole or off[0] == off[1]:
            marks = pytest.mark.matrix if any(off) else ()
            found.append(pytest.param(case, id=str(case), marks=marks))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(0, whole=True))
def test_models(case: Case) -> None:
    check_case(run_case_locally(case), case)


@pytest.mark.processes
@pytest.mark.parametrize("case", cases(1, whole=False))
def test_models_in_processes(workers: Workers, case: Case) -> None:
    check_case(workers.run(run_case, case, ranks=case.ranks), case)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "ways",
    [
        {"ranks": 4, "microbatches": 6, "strict": True},  # sends wait for their receive
        {"ranks": 2, "model": "gpt", "scale_grads": False},  # losses that are sums
        {"ranks": 2, "model": "gpt", "dropout": 0.5, "seed": 7, "calls": CALLS[1:3]},
    ],
    ids=["strict", "sums", "dropout"],
)
def test_ways_to_run(ways: dict[str, Any], schedule: str) -> None:
    usual: dict[str, Any] = {"per_rank": SCHEDULES[schedule][-1], "calls": CALLS}
    case = Case(schedule, **(usual | ways))
    found = run_case_locally(case)
    check_case(found, case)
    if case.seed is not None:
        other = run_plain(replace(case, seed=8).scenario, case.plan)
        (outputs,) = [rank.outputs for rank in found if rank.outputs]
        assert not torch.equal(outputs[0], other.outputs[0])
