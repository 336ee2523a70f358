"""The same plan for a smaller batch."""

from __future__ import annotations

import numpy as np

from taktline.errors import PlanError
from taktline.plan.plan import Plan
from taktline.plan.rows import Rows
from taktline.text import counted

__all__ = ["restrict"]


def restrict(plan: Plan, microbatches: int) -> Plan:
    """Leave out every micro-batch but the first ones; all else stays, in its order.

    Nothing waits for more than it did, so a valid plan stays valid. Of an overlapped pair one half
    may be left. What belongs to no micro-batch (UNSHARD, RESHARD, REDUCE_GRAD) stays: replicas with
    batches of different sizes gather and reduce in the same order.

    >>> from taktline.plan import build
    >>> " ".join(map(str, restrict(build("1f1b", ranks=2, microbatches=8), 2)[0]))
    '0F0 0F1 0B0 0B1'
    """
    if not 1 <= microbatches <= plan.microbatches:
        raise PlanError(
            f"plan {plan.name!r} has {counted(plan.microbatches, 'micro-batch')}; it can be "
            f"restricted to 1 up to {plan.microbatches} of them, not {microbatches}"
        )
    if microbatches == plan.microbatches:
        return plan
    by_rank = [_first(plan.rows_of(rank), microbatches) for rank in range(plan.ranks)]
    result = Plan(by_rank, plan.placement, microbatches, level=plan.level, name=plan.name)
    order = plan.known.get("order")
    if isinstance(order, np.ndarray):
        # The order that proves a lowered plan free of deadlock proves its parts, too.
        result.known["order"] = order[plan.rows.microbatch < microbatches]
    return result


def _first(rows: Rows, microbatches: int) -> Rows:
    keep = rows.microbatch < microbatches
    both = keep & np.append(keep[1:], False)
    return Rows(rows.kind, rows.stage, rows.microbatch, rows.joined & both)[keep]
