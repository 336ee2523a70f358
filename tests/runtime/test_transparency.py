"""Transparency: a pipeline gives the losses, outputs and gradients that the plain model gives."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests import models
from tests.runtime.cases import (
    SCHEDULES,
    Case,
    assert_same,
    merge,
    run_local,
    run_pipelined,
    run_plain,
)
from tests.workers import Workers

# Evaluation before, between and after training steps that accumulate; batches of several sizes,
# which are uneven micro-batches for most counts.
CALLS = (("eval", 8), ("step", 8), ("step", 8), ("eval", 9), ("step", 11), ("eval", 8))


RANKS, MICROBATCHES = (1, 2, 4), (1, 3, 8)


def cases(first: int) -> list[Any]:
    """Every schedule and model on 1, 2 and 4 ranks; 1, few, odd and many micro-batches.

    Each schedule is always run on so many ranks with one model and one number of micro-batches, all
    of which take turns. The other cases are marked ``matrix``. Another ``first``, other turns.
    """
    found: list[Any] = []
    layouts = [(schedule, n) for schedule, per_rank in SCHEDULES.items() for n in per_rank]
    numbers = product(range(len(layouts)), range(3), range(3), range(3))
    for layout, ranks, model, microbatches in numbers:
        turn = (layout + ranks) % 3, (layout // 3 + 2 * ranks + first) % 3
        schedule, per_rank = layouts[layout]
        sizes = RANKS[ranks], per_rank, MICROBATCHES[microbatches]
        case = Case(schedule, *sizes, models.NAMES[model], CALLS)
        marks = () if (model, microbatches) == turn else pytest.mark.matrix
        found.append(pytest.param(case, id=str(case), marks=marks))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(0))
def test_local(case: Case) -> None:
    assert_same(merge(run_local(case)), run_plain(case))


@pytest.mark.processes
@pytest.mark.parametrize("case", cases(1))
def test_gloo(workers: Workers, case: Case) -> None:
    assert_same(merge(workers.run(run_pipelined, case, ranks=case.ranks)), run_plain(case))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_local_with_sends_that_wait_for_their_receive(schedule: str) -> None:
    case = Case(schedule, 4, SCHEDULES[schedule][-1], 6, "mlp", CALLS, strict=True)
    assert_same(merge(run_local(case)), run_plain(case))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_that_are_sums(schedule: str) -> None:
    case = Case(schedule, 2, SCHEDULES[schedule][-1], 4, "gpt", CALLS, scale_grads=False)
    assert_same(merge(run_local(case)), run_plain(case))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_seeded_dropout_does_not_depend_on_the_schedule(schedule: str) -> None:
    case = Case(schedule, 2, SCHEDULES[schedule][-1], 4, "gpt", CALLS[1:3], dropout=0.5, seed=7)
    plain = run_plain(case)
    assert_same(merge(run_local(case)), plain)
    other = run_plain(replace(case, seed=8))
    assert not torch.equal(plain.outputs[0], other.outputs[0])
