"""Builds a schedule by its name; some of them fit their plan to given costs."""

from __future__ import annotations

from taktline.checks import check
from taktline.errors import CostError, ScheduleError
from taktline.plan.costs import Costs
from taktline.plan.memory import peak_memory
from taktline.plan.optimise import optimise
from taktline.plan.plan import Plan
from taktline.plan.registry import find

TUNED = ("zb_h2", "v_half", "v_min")
"""The schedules that are defined by their memory, and take costs."""


def build(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    costs: Costs | None = None,
) -> Plan:
    """The compute plan of a schedule.

    With costs, V-Half, V-Min and ZB-H2 are the best plan found for them. Each rank then has as much
    memory as any rank needs without.

    >>> build("1f1b", ranks=2, microbatches=3)[0]
    [Action(0F0), Action(0F1), Action(0B0), Action(0F2), Action(0B1), Action(0B2)]
    """
    schedule = find(name)
    plan = schedule.build(ranks, microbatches, stages_per_rank)
    if costs is None:
        return plan
    check("costs", costs, Costs, error=CostError)
    if schedule.name not in TUNED:
        raise ScheduleError(
            f"{schedule.name} is the same for all costs; with costs= there are: {', '.join(TUNED)}"
        )
    memory = float(peak_memory(plan, costs).max())
    found = optimise(
        costs, placement=plan.placement, microbatches=microbatches, memory=memory, rounds=4_000
    )
    return plan.with_rows([found.rows_of(rank) for rank in range(ranks)])
