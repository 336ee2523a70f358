"""The one dependency relation: which actions each action needs.

::

    action          needs, of its own stage    and from its neighbour
    sFm                                        (s-1)Fm
    sBm, sIm        sFm                        (s+1)Bm or (s+1)Im
    sWm             sIm
    sRECOMPUTEm     sFm
    sOFFLOADm       sFm
    sRELOADm        sOFFLOADm
    sSEND_Fm        sFm
    sSEND_Bm        sBm or sIm

Where the plan has ``sRECOMPUTEm`` or ``sRELOADm``, B and I need this in place of ``sFm``.

A neighbour on the same rank hands its result over directly. One on another rank does so too where
a plan leaves communication implicit; in a lowered plan, what arrives is ``(s-1)SEND_Fm`` or
``(s+1)SEND_Bm``, into a receive that this rank has posted before: ``sRECV_Fm`` or ``sRECV_Bm``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from taktline.plan.action import COPIES, Kind
from taktline.plan.plan import Level, Plan
from taktline.plan.rows import BoolArray, IntArray

NONE = -1
"""In a column of row numbers: there is no such row."""

PARTNERS = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
"""Of a send or a receive: the other one, and the step to its stage."""

SENT = {Kind.SEND_F: (Kind.F,), Kind.SEND_B: (Kind.B, Kind.I)}
"""The kinds whose result is sent."""

_WITH_MICROBATCH = sum(kind.has_microbatch for kind in Kind)
GRADIENT = _WITH_MICROBATCH
"""In the table of rows, beside the kinds: what computes the input gradient, B or else I."""
_KEPT = _WITH_MICROBATCH + 1
"""And what provides all that the backward needs: RELOAD, RECOMPUTE or else F."""

_FIRST_OF = {GRADIENT: (Kind.B, Kind.I), _KEPT: (Kind.RELOAD, Kind.RECOMPUTE, Kind.F)}

_OWN = {
    Kind.B: _KEPT,
    Kind.I: _KEPT,
    Kind.W: Kind.I,
    Kind.RECOMPUTE: Kind.F,
    Kind.OFFLOAD: Kind.F,
    Kind.RELOAD: Kind.OFFLOAD,
    Kind.SEND_F: Kind.F,
    Kind.SEND_B: GRADIENT,
}
_FROM_NEIGHBOUR = {
    Kind.F: (Kind.F, Kind.RECV_F),
    Kind.B: (GRADIENT, Kind.RECV_B),
    Kind.I: (GRADIENT, Kind.RECV_B),
}
"""Its result, and what receives this from another rank."""


def exists(plan: Plan) -> BoolArray:
    """Which rows name a stage and a micro-batch that the plan has."""
    return (plan.rows.stage < plan.stages) & (plan.rows.microbatch < plan.microbatches)


def crosses(plan: Plan, stage: IntArray, peer: IntArray) -> BoolArray:
    """Where the neighbour of a stage exists and is on another rank."""
    rank_of = np.append(plan.placement.rank_of, NONE)  # also found at -1, before the first stage
    return (rank_of[peer] != NONE) & (rank_of[peer] != rank_of[stage])


class Where:
    """Finds the row of an action: a dense table over (kind, stage, micro-batch)."""

    def __init__(self, plan: Plan) -> None:
        rows, in_range = plan.rows, exists(plan)
        found = np.bincount(rows.kind[in_range], minlength=len(Kind)) > 0
        kinds = [kind for kind in Kind if kind.has_microbatch and found[kind]]
        # What the plan does not have shares a page without rows. Behind the last stage, and so also
        # at -1, there are none either.
        self._page = page = np.zeros(_WITH_MICROBATCH + 2, np.intp)
        page[kinds] = np.arange(len(kinds)) + 1
        pages = len(kinds) + 1
        merged: list[list[int]] = []
        for name, choices in _FIRST_OF.items():
            sources = [int(page[kind]) for kind in choices if page[kind]]
            page[name] = sum(sources) if len(sources) < 2 else pages + len(merged)
            merged += [sources] if len(sources) > 1 else []
        shape = (pages + len(merged), plan.stages + 1, plan.microbatches)
        self._table = table = np.full(shape, NONE, np.int32)
        for kind in kinds:
            index = np.flatnonzero(in_range & (rows.kind == kind))
            index = index[::-1]  # where an action is doubled, the first one counts
            table[page[kind], rows.stage[index], rows.microbatch[index]] = index
        for number, sources in enumerate(merged, start=pages):
            for source in sources:
                np.copyto(table[number], table[source], where=table[number] < 0)

    def rows(
        self, kind: int | IntArray, stage: IntArray | int, microbatch: IntArray | int
    ) -> IntArray:
        """The rows of these actions, NONE where the plan does not have them.

        The stages are those of the plan, and the ones beside the first and the last.
        """
        return self._table[self._page[kind], stage, microbatch]

    def grid(self, kind: Kind) -> IntArray:
        """The rows of all actions of a kind, by stage and micro-batch."""
        return self._table[self._page[kind], :-1]


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """For each row, the rows that it needs; NONE where it needs none, or the plan has none."""

    own: IntArray
    """Of its own stage, always on the same rank."""
    arrival: IntArray
    """From the neighbouring stage: a compute action or, between ranks in a lowered plan, a SEND."""
    post: IntArray
    """The RECV that must have been posted on this rank for the arrival."""
    waits: IntArray
    """The arrival where it is on another rank; on its own rank, order is enough."""
    copy: IntArray
    """The copy of its own rank that must have ended: the RELOAD of a B or I, and of an OFFLOAD or
    RELOAD the OFFLOAD before."""


def needs(plan: Plan, where: Where | None = None) -> Needs:
    """The rows that each row needs; actions outside the plan's numbers need nothing."""
    where = where or Where(plan)
    rows, in_range = plan.rows, exists(plan)
    own, arrival = (np.full(len(rows), NONE, np.int32) for _ in range(2))
    post = np.full(len(rows), NONE, np.int32) if plan.level == Level.LOWERED else _none(plan)
    for kind, need in _OWN.items():
        index = np.flatnonzero(in_range & (rows.kind == kind))
        own[index] = where.rows(need, rows.stage[index], rows.microbatch[index])
    for kind, (result, receive) in _FROM_NEIGHBOUR.items():
        send, step = PARTNERS[receive]
        index = np.flatnonzero(in_range & (rows.kind == kind))
        stage, microbatch = rows.stage[index], rows.microbatch[index]
        arrival[index] = where.rows(result, stage + step, microbatch)
        if plan.level == Level.LOWERED:
            away = crosses(plan, stage, stage + step)
            index, stage, microbatch = index[away], stage[away], microbatch[away]
            arrival[index] = where.rows(send, stage + step, microbatch)
            post[index] = where.rows(receive, stage, microbatch)
    rank = plan.rank_of_rows()
    waits = arrival.copy()
    waits[rank[arrival] == rank] = NONE
    return Needs(own, arrival, post, waits, _copies(plan, own, rank))


def _copies(plan: Plan, own: IntArray, rank: IntArray) -> IntArray:
    if not plan.has(Kind.OFFLOAD):
        return _none(plan)
    copy, kind = np.full(len(own), NONE, np.int32), plan.rows.kind
    offloads = np.flatnonzero(kind == Kind.OFFLOAD)
    reloaded = np.isin(kind, (Kind.B, Kind.I)) & (own >= 0) & (kind[own] == Kind.RELOAD)
    copy[reloaded] = own[reloaded]
    at = np.flatnonzero(np.isin(kind, COPIES))
    before = np.append(NONE, offloads)[np.searchsorted(offloads, at)]
    copy[at] = np.where((before >= 0) & (rank[before] == rank[at]), before, NONE)
    return copy


def _none(plan: Plan) -> IntArray:
    """A column without any rows, which takes no memory."""
    return np.broadcast_to(np.int32(NONE), len(plan.rows))


def channels(plan: Plan) -> IntArray:
    """The channel in which each row sends its result to another rank, or NONE.

    A channel is (sender, receiver, activations or gradients); they are numbered from 0 on. What
    sends is a SEND or, where communication is implicit, a compute action.
    """
    rows, in_range = plan.rows, exists(plan)
    channel, names = np.full(len(rows), NONE, np.int32), _channel_names(plan)
    for gradient, (send, producers) in enumerate(SENT.items()):
        _, step = PARTNERS[send]
        kinds = (send,) if plan.level == Level.LOWERED else producers
        index = np.flatnonzero(in_range & np.isin(rows.kind, kinds))
        index = index[crosses(plan, rows.stage[index], rows.stage[index] + step)]
        channel[index] = names[gradient, rows.stage[index]]
    return channel


def _channel_names(plan: Plan) -> IntArray:
    """The channel of each stage, for activations and for gradients."""
    rank_of = np.array(plan.placement.rank_of)
    pairs = np.stack([rank_of * plan.ranks + np.roll(rank_of, -step) for step in (1, -1)])
    _, names = np.unique(pairs * 2 + [[0], [1]], return_inverse=True)
    return names.reshape(pairs.shape).astype(np.int32)
