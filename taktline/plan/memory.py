"""The memory of a plan: activations live from their forward to their backward.

F adds an activation; B releases it. In a split backward, I releases the part that W does not need,
and W the rest. Without any backward in the plan, nothing is kept beyond the forward itself.
"""

from __future__ import annotations

import numpy as np

from taktline.checks import require_instance
from taktline.plan.action import Kind
from taktline.plan.costs import Costs
from taktline.plan.plan import Plan
from taktline.plan.rows import FloatArray


def memory_curve(plan: Plan, costs: Costs | None = None) -> tuple[FloatArray, FloatArray]:
    """The memory in use on a row's rank while the row runs, and after it.

    >>> from taktline.plan import build
    >>> during, after = memory_curve(build("gpipe", ranks=1, microbatches=2))
    >>> during.tolist(), after.tolist()
    ([1.0, 2.0, 2.0, 1.0], [1.0, 2.0, 1.0, 0.0])
    """
    require_instance("plan", plan, Plan)
    costs = Costs() if costs is None else require_instance("costs", costs, Costs)
    whole = costs.of("activation", plan.stages)
    kept = costs.of("kept_for_weight", plan.stages)
    taken, released = np.zeros((2, len(Kind), plan.stages))
    taken[Kind.F] = whole
    released[Kind.B], released[Kind.I], released[Kind.W] = whole, whole - kept, kept
    if not plan.has(Kind.B, Kind.I, Kind.W):
        released[Kind.F] = whole
    rows = plan.rows
    taken, released = taken[rows.kind, rows.stage], released[rows.kind, rows.stage]
    balance = np.concatenate([[0.0], np.cumsum(taken - released)])
    at_start_of_rank = np.repeat(balance[plan.offsets[:-1]], np.diff(plan.offsets))
    after = balance[1:] - at_start_of_rank
    return after + released, after


def peak_memory(plan: Plan, costs: Costs | None = None) -> FloatArray:
    """The peak memory of each rank; at the default costs, the number of activations in flight.

    >>> from taktline.plan import build
    >>> peak_memory(build("1f1b", ranks=4, microbatches=8))
    array([4., 3., 2., 1.])
    """
    during, _ = memory_curve(plan, costs)
    by_rank = np.split(during, plan.offsets[1:-1])
    return np.array([live.max(initial=0.0) for live in by_rank])
