"""The one dependency relation: which actions each action needs.

::

    action          needs, of its own stage    and from its neighbour
    sFm                                        (s-1)Fm
    sBm, sIm        sFm                        (s+1)Bm or (s+1)Im
    sWm             sIm
    sSEND_Fm        sFm
    sSEND_Bm        sBm or sIm

A neighbour on the same rank hands its result over directly. One on another rank does so too where
a plan leaves communication implicit; in a lowered plan, what arrives is ``(s-1)SEND_Fm`` or
``(s+1)SEND_Bm``, into a receive that this rank has posted before: ``sRECV_Fm`` or ``sRECV_Bm``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from taktline.plan.action import Kind
from taktline.plan.plan import Level, Plan
from taktline.plan.rows import BoolArray, IntArray

NONE = -1
"""In a column of row numbers: there is no such row."""

HOPS = ((Kind.SEND_F, Kind.RECV_F, 1), (Kind.SEND_B, Kind.RECV_B, -1))
"""Of activations and gradients: the send, the receive, and the step to the receiving stage."""

_WITH_MICROBATCH = sum(kind.has_microbatch for kind in Kind)


def exists(plan: Plan) -> BoolArray:
    """Which rows name a stage and a micro-batch that the plan has."""
    return (plan.rows.stage < plan.stages) & (plan.rows.microbatch < plan.microbatches)


def sources(kind: Kind, stage: int, stages: int) -> list[tuple[Kind, int]]:
    """The kinds and stages that an F, I or W needs, of its own micro-batch.

    >>> sources(Kind.I, 2, stages=4)
    [(<Kind.F: 0>, 2), (<Kind.I: 2>, 3)]
    """
    own = {Kind.I: [(Kind.F, stage)], Kind.W: [(Kind.I, stage)]}.get(kind, [])
    neighbour = {Kind.F: stage - 1, Kind.I: stage + 1}.get(kind, NONE)
    return own + [(kind, neighbour)] * (0 <= neighbour < stages)


class Where:
    """Finds the row of an action: a dense table over (kind, stage, micro-batch)."""

    def __init__(self, plan: Plan) -> None:
        shape = (_WITH_MICROBATCH, plan.stages, plan.microbatches)
        self._table = np.full(shape, NONE, np.int32)
        rows = plan.rows
        index = np.flatnonzero(exists(plan) & (rows.kind < _WITH_MICROBATCH))
        index = index[::-1]  # where an action is doubled, the first one counts
        self._table[rows.kind[index], rows.stage[index], rows.microbatch[index]] = index

    def rows(
        self, kind: Kind | IntArray, stage: IntArray | int, microbatch: IntArray | int
    ) -> IntArray:
        """The rows of these actions, NONE where the plan does not have them."""
        return self._table[kind, stage, microbatch]

    def backward(self, stage: IntArray | int, microbatch: IntArray | int) -> IntArray:
        """The rows of what computes the input gradient: B, or else I."""
        full = self.rows(Kind.B, stage, microbatch)
        return np.where(full >= 0, full, self.rows(Kind.I, stage, microbatch))


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """For each row, the rows that it needs; NONE where it needs none, or the plan has none."""

    own: IntArray
    """Of its own stage, always on the same rank."""
    arrival: IntArray
    """From the neighbouring stage: a compute action or, between ranks in a lowered plan, a SEND."""
    post: IntArray
    """The RECV that must have been posted on this rank for the arrival."""


def needs(plan: Plan, where: Where | None = None) -> Needs:
    """The rows that each row needs; actions outside the plan's numbers need nothing."""
    where = where or Where(plan)
    rows, rank_of = plan.rows, np.array(plan.placement.rank_of)
    own, arrival, post = (np.full(len(rows), NONE, np.int32) for _ in range(3))
    in_range = exists(plan)

    def select(*kinds: Kind) -> tuple[IntArray, IntArray, IntArray]:
        index = np.flatnonzero(in_range & np.isin(rows.kind, kinds))
        return index, rows.stage[index], rows.microbatch[index]

    index, stage, microbatch = select(Kind.B, Kind.I, Kind.SEND_F)
    own[index] = where.rows(Kind.F, stage, microbatch)
    index, stage, microbatch = select(Kind.W)
    own[index] = where.rows(Kind.I, stage, microbatch)
    index, stage, microbatch = select(Kind.SEND_B)
    own[index] = where.backward(stage, microbatch)

    for backward, kinds in ((False, (Kind.F,)), (True, (Kind.B, Kind.I))):
        index, stage, microbatch = select(*kinds)
        neighbour = stage + 1 if backward else stage - 1
        inside = (neighbour >= 0) & (neighbour < plan.stages)
        index, stage, microbatch, neighbour = (
            column[inside] for column in (index, stage, microbatch, neighbour)
        )
        arrival[index] = (
            where.backward(neighbour, microbatch)
            if backward
            else where.rows(Kind.F, neighbour, microbatch)
        )
        if plan.level == Level.LOWERED:
            send, receive = (Kind.SEND_B, Kind.RECV_B) if backward else (Kind.SEND_F, Kind.RECV_F)
            crosses = rank_of[stage] != rank_of[neighbour]
            index, stage, microbatch, neighbour = (
                column[crosses] for column in (index, stage, microbatch, neighbour)
            )
            arrival[index] = where.rows(send, neighbour, microbatch)
            post[index] = where.rows(receive, stage, microbatch)
    return Needs(own, arrival, post)


def channels(plan: Plan) -> tuple[IntArray, BoolArray]:
    """The channel of each row, and whether the row crosses between ranks.

    A channel is (sender, receiver, activations or gradients) as one number. It is that of a SEND or
    RECV or, where communication is implicit, of a compute action whose result leaves the rank.
    """
    rows, rank_of = plan.rows, np.array(plan.placement.rank_of)
    stage = np.minimum(rows.stage, plan.stages - 1)
    step = np.zeros(len(rows), np.int32)
    step[np.isin(rows.kind, (Kind.SEND_F, Kind.RECV_B))] = 1
    step[np.isin(rows.kind, (Kind.SEND_B, Kind.RECV_F))] = -1
    if plan.level < Level.LOWERED:
        step[rows.kind == Kind.F] = 1
        step[np.isin(rows.kind, (Kind.B, Kind.I))] = -1
    peer = stage + step
    crosses = (step != 0) & (peer >= 0) & (peer < plan.stages)
    here, there = rank_of[stage], rank_of[np.clip(peer, 0, plan.stages - 1)]
    crosses &= here != there
    receives = np.isin(rows.kind, (Kind.RECV_F, Kind.RECV_B))
    sender, receiver = np.where(receives, there, here), np.where(receives, here, there)
    gradients = np.isin(rows.kind, (Kind.B, Kind.I, Kind.SEND_B, Kind.RECV_B))
    return (sender * plan.ranks + receiver) * 2 + gradients, crosses
