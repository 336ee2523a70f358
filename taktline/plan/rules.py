"""The rules for plans: each is a function that reports every row which breaks it.

Rules look at whole columns and make objects only for violations. The rule that needs a walk through
all ranks, freedom from deadlock, is in :mod:`taktline.plan.validate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from taktline.plan.action import Action, Kind
from taktline.plan.deps import (
    GRADIENT,
    NONE,
    PARTNERS,
    SENT,
    Where,
    channels,
    crosses,
    exists,
    needs,
)
from taktline.plan.plan import Level, Plan
from taktline.plan.rows import BoolArray, IntArray
from taktline.text import counted


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: where, by which action, and what is wrong.

    >>> from taktline.plan import Plan, validate
    >>> violation = validate(Plan.from_actions([["0F0", "0F0"]]))[0]
    >>> violation.rule, violation.rank, violation.position, violation.action
    ('duplicate', 0, 1, Action(0F0))
    """

    rule: str
    message: str
    rank: int | None = None
    position: int | None = None
    """The index of the action in its rank's list."""
    action: Action | None = None
    cycle: tuple[tuple[int, Action, Action], ...] = ()
    """For a deadlock: each (rank, its current action, the action that it waits for)."""

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}, "
        position = "" if self.position is None else f"position {self.position}, "
        action = "" if self.action is None else f"{self.action}: "
        return f"[{self.rule}] {rank}{position}{action}{self.message}"


class Subject:
    """A plan under examination, with the columns that several rules look at."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rank = plan.rank_of_rows()
        self.exists = exists(plan)
        self.where = Where(plan)
        self.needs = needs(plan, self.where)

    @cached_property
    def partner(self) -> IntArray:
        """Of each SEND its RECV, and the reverse."""
        rows, partner = self.plan.rows, np.full(len(self.plan.rows), NONE)
        for kind, (other, step) in PARTNERS.items():
            at = self.select(kind)
            partner[at] = self.where.rows(other, rows.stage[at] + step, rows.microbatch[at])
        return partner

    @cached_property
    def position(self) -> IntArray:
        """Of each row, the place of its action in its rank's list."""
        index = np.cumsum(~self.plan.rows.second_of_pair()) - 1
        return index - np.append(index, len(self.plan))[self.plan.offsets[:-1]][self.rank]

    def at(self, row: int, rule: str, message: str) -> Violation:
        """A violation by the action in this row."""
        return Violation(
            rule, message, int(self.rank[row]), int(self.position[row]), self.plan.rows.leaf(row)
        )

    def absent(self, rule: str, message: str, action: Action) -> Violation:
        """A violation by an action that the plan does not have."""
        return Violation(rule, message, self.plan.placement.rank_of[action.stage], None, action)

    def select(self, *kinds: Kind) -> IntArray:
        """The rows of these kinds whose numbers exist."""
        return np.flatnonzero(self.exists & np.isin(self.plan.rows.kind, kinds))


_COMPUTES = tuple(kind for kind in Kind if kind.is_compute)

Rule = Callable[[Subject], Iterator[Violation]]


def sizes(plan: Plan) -> Iterator[Violation]:
    """The plan has about as many actions as its numbers of stages and micro-batches ask for.

    A typing error in one number must not make all tables huge that are sized by it.
    """
    cells = plan.stages * plan.microbatches
    if cells > 2 * len(plan.rows) + 10_000:
        row = int(plan.rows.microbatch.argmax())
        rank = int(np.searchsorted(plan.offsets, row, side="right")) - 1
        yield Violation(
            "missing",
            f"with {counted(plan.stages, 'stage')} × {counted(plan.microbatches, 'micro-batch')} "
            f"there must be {cells:,} forwards, but the plan has only {len(plan.rows):,} actions; "
            "this is the one with the highest micro-batch: is the number right?",
            rank,
            None,
            plan.rows.leaf(row),
        )


def out_of_range(subject: Subject) -> Iterator[Violation]:
    """Stages and micro-batches are those of the plan."""
    plan = subject.plan
    for row in np.flatnonzero(~subject.exists).tolist():
        what, limit = ("micro-batch", plan.microbatches)
        if plan.rows.stage[row] >= plan.stages:
            what, limit = ("stage", plan.stages)
        yield subject.at(row, "range", f"the plan has only {counted(limit, what)}")


def wrong_rank(subject: Subject) -> Iterator[Violation]:
    """A stage's actions are on its rank."""
    plan = subject.plan
    rank_of = np.array(plan.placement.rank_of, np.int32)
    owner = rank_of[np.where(subject.exists, plan.rows.stage, 0)]
    for row in np.flatnonzero(subject.exists & (owner != subject.rank)).tolist():
        stage = int(plan.rows.stage[row])
        yield subject.at(row, "rank", f"stage {stage} is on rank {rank_of[stage]}")


def duplicate(subject: Subject) -> Iterator[Violation]:
    """Nothing is done twice."""
    rows, where = subject.plan.rows, subject.where
    kinds = [kind for kind in Kind if kind.has_microbatch and subject.plan.has(kind)]
    count = np.count_nonzero(subject.exists & (rows.microbatch >= 0))
    again = count - sum(np.count_nonzero(where.grid(kind) >= 0) for kind in kinds)
    if not again and not (subject.plan.has(Kind.B) and subject.plan.has(Kind.I, Kind.W)):
        return
    index = subject.select(*kinds)
    kind, stage, microbatch = rows.kind[index], rows.stage[index], rows.microbatch[index]
    first = where.rows(kind, stage, microbatch)
    again = first != index
    for row, earlier in zip(index[again].tolist(), first[again].tolist(), strict=True):
        yield subject.at(row, "duplicate", f"done before, {_place(subject, earlier)}")
    index = subject.select(Kind.I, Kind.W)
    full = where.rows(Kind.B, rows.stage[index], rows.microbatch[index])
    for row, other in zip(index[full >= 0].tolist(), full[full >= 0].tolist(), strict=True):
        leaf = rows.leaf(other)
        yield subject.at(row, "duplicate", f"{leaf} does this too, {_place(subject, other)}")


def missing(subject: Subject) -> Iterator[Violation]:
    """Every stage runs every micro-batch forward and, if any backward is planned, backward."""
    plan, where = subject.plan, subject.where

    def absent(kind: Kind, mask: BoolArray) -> Iterator[Violation]:
        for stage, microbatch in np.argwhere(mask).tolist():
            action = Action(stage, kind, microbatch)
            yield subject.absent("missing", "is not in the plan", action)

    yield from absent(Kind.F, where.grid(Kind.F) < 0)
    if plan.has(Kind.B, Kind.I, Kind.W):
        full, inputs, weights = (where.grid(kind) >= 0 for kind in (Kind.B, Kind.I, Kind.W))
        yield from absent(Kind.B, ~full & ~inputs & ~weights)
        yield from absent(Kind.I, weights & ~inputs & ~full)
        yield from absent(Kind.W, inputs & ~weights & ~full)


def kept(subject: Subject) -> Iterator[Violation]:
    """What a forward keeps is offloaded and reloaded, or recomputed, for a backward."""
    rows, where = subject.plan.rows, subject.where
    for row in subject.select(Kind.RECOMPUTE, Kind.OFFLOAD, Kind.RELOAD).tolist():
        stage, microbatch, kind = int(rows.stage[row]), int(rows.microbatch[row]), rows.kind[row]
        other = Kind.OFFLOAD if kind == Kind.RELOAD else Kind.RELOAD
        if where.rows(GRADIENT, stage, microbatch) < 0:
            yield subject.at(row, "kept", "no B or I of the plan needs it: leave it out")
        elif kind != Kind.RECOMPUTE and where.rows(other, stage, microbatch) < 0:
            action = Action(stage, other, microbatch)
            yield subject.absent("missing", f"{rows.leaf(row)} needs it", action)
        elif kind == Kind.RECOMPUTE and (copy := where.rows(other, stage, microbatch)) >= 0:
            text = f"is reloaded too, {_place(subject, int(copy))}: leave one out"
            yield subject.at(row, "kept", text)


def order(subject: Subject) -> Iterator[Violation]:
    """On one rank, an action comes after the actions that it needs."""
    rows, rank = subject.plan.rows, subject.rank
    # Both rows of a pair run together, so from the first one on, it is too late for either.
    pair_of = np.arange(len(rows), dtype=np.int32) - rows.second_of_pair()
    for column in (subject.needs.own, subject.needs.arrival, subject.needs.post):
        late = (column >= pair_of) & (rank[column] == rank)
        for row in np.flatnonzero(late).tolist():
            need, position = int(column[row]), subject.position
            when = "runs together with it" if position[need] == position[row] else "comes later"
            yield subject.at(
                row, "order", f"needs {rows.leaf(need)}, which {when} ({_place(subject, need)})"
            )


def partners(subject: Subject) -> Iterator[Violation]:
    """A send has its receive and the reverse, both where two stages lie on different ranks."""
    plan, rows = subject.plan, subject.plan.rows
    for kind, (partner, step) in PARTNERS.items():
        index = subject.select(kind)
        away = crosses(plan, rows.stage[index], rows.stage[index] + step)
        for row in index[~away].tolist():
            peer = int(rows.stage[row]) + step
            if 0 <= peer < plan.stages:
                text = f"stage {peer} is on the same rank: leave it out"
            else:
                text = f"stage {rows.stage[row]} has no neighbour on that side"
            yield subject.at(row, "partner", text)
        for row in index[away & (subject.partner[index] < 0)].tolist():
            action = Action(int(rows.stage[row]) + step, partner, int(rows.microbatch[row]))
            peer = plan.placement.rank_of[action.stage]
            yield subject.at(row, "partner", f"rank {peer} has no {action} for it")


def untransported(subject: Subject) -> Iterator[Violation]:
    """In a lowered plan, what crosses between ranks has a send or a receive."""
    plan, rows, where = subject.plan, subject.plan.rows, subject.where
    if plan.level < Level.LOWERED:
        return
    for send, producers in SENT.items():
        receive, step = PARTNERS[send]
        index = subject.select(*producers)
        stage, microbatch = rows.stage[index], rows.microbatch[index]
        lost = (
            crosses(plan, stage, stage + step)
            & (where.rows(send, stage, microbatch) < 0)
            & (where.rows(receive, stage + step, microbatch) < 0)
        )
        for row in index[lost].tolist():
            action = Action(int(rows.stage[row]), send, int(rows.microbatch[row]))
            peer = plan.placement.rank_of[action.stage + step]
            text = f"rank {peer} needs it from rank {subject.rank[row]}"
            yield subject.absent("missing", text, action)


def channel_order(subject: Subject) -> Iterator[Violation]:
    """Receives are posted in the order of their sends; reported once for each channel."""
    plan, rows = subject.plan, subject.plan.rows
    if plan.level < Level.LOWERED:
        return
    channel = channels(plan)
    sends = np.flatnonzero((channel >= 0) & (subject.partner >= 0))
    # Rows are in program order, so a stable sort by channel keeps the order within each.
    sends = sends[np.argsort(channel[sends], kind="stable")]
    receives = subject.partner[sends]
    same = channel[sends[1:]] == channel[sends[:-1]]
    swapped = np.flatnonzero(same & (receives[1:] < receives[:-1])) + 1
    _, first = np.unique(channel[sends[swapped]], return_index=True)
    for at in swapped[first].tolist():
        row, mine, other = int(sends[at]), int(receives[at]), int(receives[at - 1])
        yield subject.at(
            row,
            "channel",
            f"is sent after {rows.leaf(int(sends[at - 1]))}, but rank {subject.rank[mine]} "
            f"posts {rows.leaf(mine)} (position {subject.position[mine]}) before "
            f"{rows.leaf(other)} (position {subject.position[other]})",
        )


def sharding(subject: Subject) -> Iterator[Violation]:
    """A stage computes only between its UNSHARD and its RESHARD, in a plan that has any."""
    plan, rows = subject.plan, subject.plan.rows
    if not plan.has(Kind.UNSHARD, Kind.RESHARD):
        return
    index = subject.select(*_COMPUTES, Kind.UNSHARD, Kind.RESHARD)
    index = index[np.argsort(rows.stage[index], kind="stable")]
    kind, stage = rows.kind[index], rows.stage[index]
    is_event = np.isin(kind, (Kind.UNSHARD, Kind.RESHARD))
    latest = np.maximum.accumulate(np.where(is_event, np.arange(len(index)), -1))
    before = np.concatenate([[-1], latest[:-1]])
    ready = (before >= 0) & (stage[before] == stage) & (kind[before] == Kind.UNSHARD)
    for at in np.flatnonzero(ready == (kind == Kind.UNSHARD)).tolist():
        state = (
            "is unsharded already: leave one out"
            if ready[at]
            else "is not unsharded here: put an UNSHARD before it"
        )
        yield subject.at(int(index[at]), "shard", f"stage {stage[at]} {state}")


def reduction(subject: Subject) -> Iterator[Violation]:
    """A stage's gradients are reduced once, after its last backward, in a plan that reduces."""
    plan, rows = subject.plan, subject.plan.rows
    if not plan.has(Kind.REDUCE_GRAD):
        return
    done: dict[int, int] = {}
    for row in subject.select(Kind.REDUCE_GRAD).tolist():
        stage = int(rows.stage[row])
        if stage in done:
            yield subject.at(row, "duplicate", f"done before, {_place(subject, done[stage])}")
        done.setdefault(stage, row)
    backward = subject.select(Kind.B, Kind.W)
    last = np.full(plan.stages, -1)
    np.maximum.at(last, rows.stage[backward], backward)
    for stage in range(plan.stages):
        if stage not in done:
            action = Action(stage, Kind.REDUCE_GRAD)
            yield subject.absent("missing", "is not in the plan, others are", action)
        elif done[stage] < last[stage]:
            need = int(last[stage])
            yield subject.at(
                done[stage],
                "order",
                f"comes before {rows.leaf(need)} ({_place(subject, need)}) of its stage",
            )


RULES: tuple[Rule, ...] = (
    out_of_range,
    wrong_rank,
    duplicate,
    missing,
    kept,
    order,
    partners,
    untransported,
    channel_order,
    sharding,
    reduction,
)


def _place(subject: Subject, row: int) -> str:
    return f"rank {subject.rank[row]}, position {subject.position[row]}"
