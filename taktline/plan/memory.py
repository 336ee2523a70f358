"""The memory of activations: it follows from the order of a plan's actions, not from times.

F adds an activation; B releases it. In a split backward, I releases the part that W does not need,
and W the rest. Without any backward, nothing is kept beyond the forward itself.

A forward that is recomputed keeps less, until its RECOMPUTE. What an OFFLOAD copies is free when
the rank's next copy starts, which waits for its end; a RELOAD takes it again. The host holds it
from the OFFLOAD to the end of the backward.
"""

from __future__ import annotations

import numpy as np

from taktline.checks import check
from taktline.plan.action import COPIES, Kind
from taktline.plan.costs import Costs
from taktline.plan.deps import Where, needs
from taktline.plan.plan import Plan
from taktline.plan.rows import FloatArray


def memory_curve(
    plan: Plan, costs: Costs | None = None, *, host: bool = False
) -> tuple[FloatArray, FloatArray]:
    """The memory in use on a row's rank while the row runs, and after it; or that of its host.

    >>> from taktline.plan import build
    >>> during, after = memory_curve(build("gpipe", ranks=1, microbatches=2))
    >>> during.tolist(), after.tolist()
    ([1.0, 2.0, 2.0, 1.0], [1.0, 2.0, 1.0, 0.0])
    """
    check("plan", plan, Plan)
    costs = Costs() if costs is None else check("costs", costs, Costs)
    taken, released = (_host if check("host", host, bool) else _device)(plan, costs)
    balance = np.concatenate([[0.0], np.cumsum(taken - released)])
    at_start_of_rank = np.repeat(balance[plan.offsets[:-1]], np.diff(plan.offsets))
    after = balance[1:] - at_start_of_rank
    return after + released, after


def peak_memory(plan: Plan, costs: Costs | None = None, *, host: bool = False) -> FloatArray:
    """The peak memory of each rank: bytes, or whole micro-batches if the costs have no bytes.

    >>> from taktline.plan import Plan, build
    >>> peak_memory(build("1f1b", ranks=4, microbatches=8))
    array([4., 3., 2., 1.])
    >>> peak_memory(build("zbv", ranks=4, microbatches=8))
    array([4., 4., 4., 4.])
    >>> plan = Plan.from_actions(["0F0 0OFFLOAD0 0F1 0B1 0RELOAD0 0B0".split()])
    >>> peak_memory(plan), peak_memory(plan, host=True)
    (array([2.]), array([1.]))
    """
    during, _ = memory_curve(plan, costs, host=host)
    by_rank = np.split(during, plan.offsets[1:-1])
    return np.array([live.max(initial=0.0) for live in by_rank])


def _device(plan: Plan, costs: Costs) -> tuple[FloatArray, FloatArray]:
    """What each row takes when it starts, and what it releases when it ends."""
    rows, stages = plan.rows, plan.stages
    parts = ("activation", "kept_for_weight", "offloadable", "kept_for_recompute")
    whole, kept, moved, little = (costs.keeps(plan.placement, part) for part in parts)
    taken, released = np.zeros((2, len(Kind), stages))
    taken[Kind.F] = whole
    released[Kind.B], released[Kind.I], released[Kind.W] = whole, whole - kept, kept
    if not plan.has(Kind.B, Kind.I, Kind.W):
        released[Kind.F] = whole
    less = whole - little
    taken[Kind.RELOAD], taken[Kind.RECOMPUTE] = moved, less
    taken, released = taken[rows.kind, rows.stage], released[rows.kind, rows.stage]
    if plan.has(Kind.RECOMPUTE):
        again = np.flatnonzero(rows.kind == Kind.RECOMPUTE)
        forward = Where(plan).rows(Kind.F, rows.stage[again], rows.microbatch[again])
        taken[forward] -= less[rows.stage[again]]
    if plan.has(*COPIES):
        copies = np.flatnonzero(np.isin(rows.kind, COPIES))
        one, following = copies[:-1], copies[1:]
        rank = plan.rank_of_rows()
        frees = (rows.kind[one] == Kind.OFFLOAD) & (rank[one] == rank[following])
        taken[following[frees]] -= moved[rows.stage[one[frees]]]
    return taken, released


def _host(plan: Plan, costs: Costs) -> tuple[FloatArray, FloatArray]:
    rows, own = plan.rows, needs(plan).own
    moved = costs.keeps(plan.placement, "offloadable")[rows.stage]
    taken = np.where(rows.kind == Kind.OFFLOAD, moved, 0.0)
    back = (rows.kind > Kind.F) & (rows.kind < Kind.W) & (own >= 0)
    return taken, np.where(back & (rows.kind[own] == Kind.RELOAD), moved, 0.0)
