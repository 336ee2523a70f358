"""Every feature × every schedule × {local ranks, processes}: what the plain model gives."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.runtime.cases import SCHEDULES
from tests.runtime.features import DYNAMIC, FEATURES, INEXACT, Jump, plain_batch
from tests.runtime.scenarios import (
    Scenario,
    assert_same,
    plan_for,
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
