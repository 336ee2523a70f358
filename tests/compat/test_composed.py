"""Pipelines under torch's names × data or tensor parallelism, however their steps are run."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from taktline.compat import torch_pipelining
from tests.compat.programs import wrapped
from tests.runtime.parallel import WRAPPERS, Case, Outcome, Rank, assert_like_plain
from tests.runtime.test_data_parallel import in_tensor_parallel
from tests.workers import Workers

pytestmark = pytest.mark.processes

# Steps that add up, an update after which all must be gathered anew, and evaluation in between.
CALLS = ("eval", "step", "update", "eval", "step", "step")


def _cases(rank: int, group: dist.ProcessGroup, cases: list[Case], ours: bool) -> list[Outcome]:
    outcomes = []
    for case in cases:
        mine = Rank(group, case, names=torch_pipelining)
        for stage in mine.stages:
            if not ours:
                wrapped(stage)
        losses = [mine.call(name, number) for number, name in enumerate(case.calls)]
        assert mine.schedule._on_ours is ours  # pyright: ignore[reportAttributeAccessIssue]
        outcomes.append((mine.gradients(), losses))
    return outcomes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "tensor parallel"])
def test_gradients_equal_those_of_the_plain_model(
    workers: Workers, wrapper: str, ours: bool
) -> None:
    names = ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
    cases = [
        Case(name, WRAPPERS[wrapper], CALLS, "mlp")
        if wrapper in WRAPPERS
        else Case(name, in_tensor_parallel, CALLS, data=())
        for name in names
    ]
    found = workers.run(_cases, cases, ours, ranks=4)
    for number, case in enumerate(cases):
        assert_like_plain([outcomes[number] for outcomes in found], case)
