"""Reduce a stage's gradients once they are complete."""

from __future__ import annotations

import numpy as np

from taktline.checks import require_instance
from taktline.errors import PlanError
from taktline.plan.action import Kind
from taktline.plan.plan import Level, Plan
from taktline.plan.rows import Rows

__all__ = ["add_reduce"]


def add_reduce(plan: Plan) -> Plan:
    """Add REDUCE_GRAD behind each stage's last B or W.

    >>> from taktline.plan import Plan
    >>> plan = Plan.from_actions([["0F0", "1F0", "1B0", "0B0"]])
    >>> " ".join(map(str, add_reduce(plan)[0]))
    '0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD'
    """
    require_instance("plan", plan, Plan)
    if plan.level == Level.LOWERED or plan.has(Kind.REDUCE_GRAD):
        raise PlanError(
            "add_reduce needs a plan without REDUCE_GRAD, SEND and RECV; apply it once, and before "
            "add_comm"
        )
    by_rank = [_reduce(plan.rows_of(rank)) for rank in range(plan.ranks)]
    return plan.with_rows(by_rank, Level.SHARDED)


def _reduce(rows: Rows) -> Rows:
    backward = np.flatnonzero(np.isin(rows.kind, (Kind.B, Kind.W)))
    stages, from_behind = np.unique(rows.stage[backward][::-1], return_index=True)
    last = backward[::-1][from_behind]
    order = np.argsort(np.concatenate([np.arange(len(rows)), last]), kind="stable")
    return Rows.concatenate([rows, Rows.of(np.full(len(stages), Kind.REDUCE_GRAD), stages)])[order]
