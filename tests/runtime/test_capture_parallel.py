"""Captured steps of stages in DDP, FSDP2 and ``replicate``, as far as they need no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.runtime.parallel import WRAPPERS, Case, Rank
from tests.runtime.scenarios import SCHEDULES
from tests.runtime.test_capture import Graphs, capture
from tests.workers import Workers

CALLS = (*("step",) * 4, *("update", "step") * 2, "step", "update", "eval", "step", "update")


def run_both(rank: int, group: dist.ProcessGroup, case: Case) -> tuple[list[str], bool]:
    """What a captured schedule does, and whether all is as in an eager one."""
    eager, captured = Rank(group, case), Rank(group, case)
    graphs, same = Graphs(), True
    capture(captured.schedule, graphs)
    for number, name in enumerate(case.calls):
        ours, theirs = (each.call(name, number) for each in (captured, eager))
        same &= all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs)
        mine, others = captured.gradients(), eager.gradients()
        same &= mine.keys() == others.keys()
        same &= all(torch.equal(mine[name], others[name]) for name in mine)
    return graphs.log, same


def cases() -> list[Any]:
    found = {
        f"{name}-{schedule}": (Case(schedule, wrap, CALLS, "mlp"), number % 4 == turn)
        for number, schedule in enumerate(SCHEDULES)
        for turn, (name, wrap) in enumerate(WRAPPERS.items())
    }
    return [
        pytest.param(case, id=name, marks=() if taken else pytest.mark.matrix)
        for name, (case, taken) in found.items()
    ]


@pytest.mark.processes
@pytest.mark.parametrize("case", cases())
def test_as_in_eager_steps(workers: Workers, case: Case) -> None:
    for log, same in workers.run(run_both, case, ranks=4):
        assert same
        assert log.count("capture") == 1
        assert log.count("replay") == 5
