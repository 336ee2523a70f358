"""Spell out every message between ranks."""

from __future__ import annotations

import numpy as np

from taktline.plan.action import Kind
from taktline.plan.deps import channels
from taktline.plan.plan import Level, Plan
from taktline.plan.rows import FloatArray, IntArray, Rows
from taktline.plan.validate import require_valid
from taktline.plan.walk import Walk, unit_run

__all__ = ["add_comm"]


def add_comm(plan: Plan) -> Plan:
    """Add a SEND after what leaves a rank, and its RECV on the other side.

    ::

        rank 0 │ 0F0 0SEND_F0 …           rank 0 │ … 0RECV_B0 … 0B0
        rank 1 │ 1RECV_F0 … 1F0           rank 1 │ 1B0 1SEND_B0 …

    Everything is placed along one run of the plan at unit cost. A receive is posted before what its
    rank is doing when the message is sent in that run: early enough to overlap, late enough to keep
    no buffer for nothing. All posts, sends and computations then follow one order in time, so that
    not even sends that block until their receive is posted can close a circle. Posts of one channel
    keep the order of its sends.

    >>> from taktline.plan import build
    >>> " ".join(map(str, add_comm(build("1f1b", ranks=2, microbatches=2))[1]))
    '1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1'
    """
    require_valid(plan)
    if plan.level == Level.LOWERED:
        return plan
    rows, rank = plan.rows, plan.rank_of_rows()
    run = unit_run(plan)
    sources = np.flatnonzero(channels(plan)[1])
    moment = run.arrival[sources]
    forward = rows.kind[sources] == Kind.F
    stage, microbatch = rows.stage[sources], rows.microbatch[sources]
    peer_stage = np.where(forward, stage + 1, stage - 1)
    sends = Rows.of(np.where(forward, Kind.SEND_F, Kind.SEND_B), stage, microbatch)
    receives = Rows.of(np.where(forward, Kind.RECV_F, Kind.RECV_B), peer_stage, microbatch)
    receiver = np.array(plan.placement.rank_of)[peer_stage]

    # A receive stands in front of one of the plan's rows, a send behind its whole source.
    in_front_of = _under_way(plan, receiver, moment, run)
    behind = sources + rows.joined[sources]
    anchor = np.concatenate([in_front_of, np.arange(len(rows)), behind])
    turn = np.repeat(np.array([0, 1, 2], np.int8), [len(sources), len(rows), len(sources)])
    time = np.concatenate([moment, np.zeros(len(rows)), moment])
    order = np.lexsort((time, turn, anchor))
    lowered = Rows.concatenate([receives, rows, sends])[order]
    cuts = np.searchsorted(
        np.concatenate([receiver, rank, rank[sources]])[order], np.arange(plan.ranks + 1)
    )
    result = plan.with_rows(
        [lowered[cuts[r] : cuts[r + 1]] for r in range(plan.ranks)], Level.LOWERED
    )
    # The global order along which all this was placed, as whole numbers: three turns a unit of
    # time, in which sends come first, then receives, then computations.
    computes = rows.kind <= Kind.W
    posted = np.minimum(3 * run.start[in_front_of] + 1, 3 * moment - 1)
    result.known["order"] = np.concatenate([posted, 3 * run.start + 2 * computes, 3 * moment])[
        order
    ]
    return result


def _under_way(plan: Plan, receiver: IntArray, moment: FloatArray, run: Walk) -> IntArray:
    """The receiver's action that is under way, or just done, at a moment; if idle, its next."""
    actions = np.flatnonzero((plan.rows.kind <= Kind.W) & ~plan.rows.second_of_pair())
    # One number for (rank, time), so that one search serves all ranks: a rank's actions end in
    # order, and the first that has not ended before the moment is the one.
    rank, step = plan.rank_of_rows()[actions], run.arrival.max(initial=0.0) + 1.0
    ends: FloatArray = run.arrival[actions] + rank * step
    moments: FloatArray = moment + receiver * step
    return actions[np.searchsorted(ends, moments)]
