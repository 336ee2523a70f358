"""Pipelines × data: every wrapper under every schedule trains as the plain model does."""

from __future__ import annotations

import pytest

from tests.runtime.cases import SCHEDULES
from tests.runtime.parallel import WRAPPERS, Case, assert_like_plain, run_case
from tests.workers import Workers

CLOSE = {"rtol": 1e-9, "atol": 1e-12}

# Evaluation before, between and after steps that add up.
CALLS = ("eval", "step", "step", "eval", "step", "eval")


@pytest.mark.processes
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_equal_those_of_the_plain_model(
    workers: Workers, schedule: str, wrapper: str
) -> None:
    case = Case(schedule, WRAPPERS[wrapper], CALLS)
    assert_like_plain(workers.run(run_case, case, ranks=4), case, **CLOSE)
