"""A plan ready to run: lowered for training, or its forwards; all ranks in one order."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from taktline.checks import require_whole, warn
from taktline.errors import DeadlockError, ScheduleError
from taktline.plan import Kind, Level, Plan, lower, require_valid, restrict, validate
from taktline.plan.deps import needs
from taktline.plan.rows import Rows

_MESSAGES = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a rank may hold at a time, where a plan does not say."""

    max_active_stages: int = 3
    """How many of a rank's sharded stages are gathered."""
    unshard_lookahead: str | tuple[int, ...] = "full"
    """How many of them are gathered in advance: "full" is all, "auto" one more on each rank."""
    max_outstanding_sends: int | None = None
    """How many messages of a rank may be under way, before the next one waits; None: any number."""

    def __post_init__(self) -> None:
        most, ahead, sends = self.max_active_stages, self.unshard_lookahead, "max_outstanding_sends"
        require_whole("max_active_stages", most, least=1, error=ScheduleError)
        if self.max_outstanding_sends is not None:
            require_whole(sends, self.max_outstanding_sends, least=0, error=ScheduleError)
        if ahead not in ("full", "auto") and not isinstance(ahead, tuple):
            raise ScheduleError(
                "unshard_lookahead must be 'full', 'auto', or a tuple of a whole number for each "
                f"rank, got {ahead!r}"
            )
        if isinstance(ahead, tuple):
            for rank, number in enumerate(ahead):
                name = f"unshard_lookahead[{rank}]"
                require_whole(name, number, least=1, most=most, error=ScheduleError)

    def ahead(self, ranks: int) -> list[int]:
        """For each rank, how many stages are gathered in advance.

        >>> Limits(4, "auto").ahead(4)
        [2, 3, 4, 4]
        """
        most, given = self.max_active_stages, self.unshard_lookahead
        if isinstance(given, str):
            return [most if given == "full" else min(rank + 2, most) for rank in range(ranks)]
        if len(given) != ranks:
            raise ScheduleError(
                "unshard_lookahead tuple length must equal the pipeline degree "
                f"({ranks}), got {len(given)}"
            )
        return [*given]


class Runnable:
    """A valid plan, lowered for the stages that run it.

    Args:
        plan: the plan.
        shards: whether stages of any rank are gathered before they compute.
        reduces: whether stages of any rank average gradients over replicas.
        limits: what a rank may hold at a time.

    Actions for either are added unless the plan has its own.

    >>> from taktline.plan import build
    >>> runnable = Runnable(build("1f1b", ranks=2, microbatches=2))
    >>> " ".join(map(str, runnable.forward_only[1]))
    '1RECV_F0 1RECV_F1 1F0 1F1'
    """

    def __init__(
        self,
        plan: Plan,
        *,
        shards: bool = False,
        reduces: bool = False,
        limits: Limits = Limits(),  # noqa: B008
    ) -> None:
        require_valid(plan)
        self.limits = limits
        self._ahead = limits.ahead(plan.ranks)
        self.plan = plan
        self.fingerprint = int(plan.digest()[:15], 16)
        self._shards = shards
        self._reduces = reduces
        self._check_sends()
        if not self.sends_may_wait:
            warn(
                f"plan {plan.name!r} can deadlock where a send waits until its receive is posted: "
                f"{validate(plan)[0]}. It runs with sends that do not wait; leave out its SEND and "
                "RECV, and safe ones are added"
            )

    def _check_sends(self) -> None:
        """Raise if no order of waits can keep the number of messages that may be under way."""
        most = self.limits.max_outstanding_sends
        if most is None or (most and self.sends_may_wait):
            return
        if len(set(self.plan.placement.rank_of)) > 1:
            raise ScheduleError(
                f"Cannot satisfy max_outstanding_sends={most} for plan {self.plan.name!r}: a send "
                + ("waits for one before its receive is posted" if most else "is one message")
                + "; increase the limit, or leave out the SEND and RECV of the plan"
            )

    def with_wrapped(self, *, shards: bool, reduces: bool) -> Runnable:
        """The same plan for wrapped stages."""
        if (shards, reduces) == (self._shards, self._reduces):
            return self
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first one has warned
            return Runnable(self.plan, shards=shards, reduces=reduces, limits=self.limits)

    @cached_property
    def sends_may_wait(self) -> bool:
        """Whether the plan cannot deadlock where every send waits until its receive is posted."""
        return self.plan.level < Level.LOWERED or not validate(self.plan)

    def program(self, microbatches: int, *, trains: bool) -> Plan:
        """The plan of a step; a batch with few rows runs the first micro-batches."""
        return restrict(self.lowered if trains else self.forward_only, microbatches)

    @cached_property
    def lowered(self) -> Plan:
        """The plan with its messages, and the actions of wrapped stages."""
        plan = self.plan
        shards = self._shards and not plan.has(Kind.UNSHARD, Kind.RESHARD)
        reduces = self._reduces and not plan.has(Kind.REDUCE_GRAD)
        if plan.level == Level.COMPUTE:
            return self._lowered(plan, shards=shards, reduces=reduces)
        if shards or reduces:
            by_rank = [plan.rows_of(rank) for rank in range(plan.ranks)]
            plan = plan.with_rows([_wrapped(rows, shards, reduces) for rows in by_rank], plan.level)
        return lower(plan)

    @cached_property
    def forward_only(self) -> Plan:
        """The forwards in the plan's order, with their messages."""
        by_rank = [self.plan.rows_of(rank) for rank in range(self.plan.ranks)]
        forwards = [rows[rows.kind == Kind.F] for rows in by_rank]
        apart = [Rows.of(rows.kind, rows.stage, rows.microbatch) for rows in forwards]
        plan = self.plan.with_rows(apart, Level.COMPUTE)
        return self._lowered(plan, shards=self._shards, reduces=False)

    def _lowered(self, plan: Plan, *, shards: bool, reduces: bool) -> Plan:
        keep_ready = self.limits.max_active_stages if shards else None
        return lower(plan, keep_ready=keep_ready, ahead=self._ahead, reduce=reduces)


def _wrapped(rows: Rows, shards: bool, reduces: bool) -> Rows:
    """Rows of any level, with each stage gathered from its first to its last computation."""
    second, joined = rows.second_of_pair(), rows.joined
    added: list[tuple[Kind, int, float]] = []
    computes = rows.kind <= Kind.W
    for stage in np.unique(rows.stage[computes]).tolist():
        at = np.flatnonzero(computes & (rows.stage == stage))
        # Around an overlapped pair, not between its halves.
        first, last = at[0] - int(second[at[0]]), at[-1] + int(joined[at[-1]])
        if shards:
            added += [(Kind.UNSHARD, stage, first - 0.5), (Kind.RESHARD, stage, last + 0.5)]
        if reduces and np.isin(rows.kind[at], (Kind.B, Kind.W)).any():
            added.append((Kind.REDUCE_GRAD, stage, last + 0.25))
    kinds, stages, places = (np.array([each[i] for each in added]) for i in range(3))
    order = np.argsort(np.concatenate([np.arange(len(rows)), places]), kind="stable")
    return Rows.concatenate([rows, Rows.of(kinds, stages)])[order]


def merged(plan: Plan) -> Rows:
    """The rows of all ranks in one order, without messages; computed once for a plan.

    A rank that gets a result goes on with it, so that no rank runs ahead of the others::

        rank 0   F0           F1                   F2
        rank 1      F0           F1          B0       F2
        rank 2         F0 B0        F1 B1                F2 B2

    >>> from taktline.plan import build, lower
    >>> rows = merged(lower(build("gpipe", ranks=3, microbatches=2)))
    >>> " ".join(map(str, rows.actions()))
    '0F0 1F0 2F0 0F1 1F1 2F1 2B0 1B0 0B0 2B1 1B1 0B1'
    """
    if "merged" not in plan.known:
        rows = plan.rows[np.array(_order(plan), np.intp)]
        rows = rows[~np.isin(rows.kind, _MESSAGES)]
        plan.known["merged"] = Rows.of(rows.kind, rows.stage, rows.microbatch)
    return cast(Rows, plan.known["merged"])


def _order(plan: Plan) -> list[int]:
    """All rows, each after the row that it waits for."""
    waits, rank_of = needs(plan).waits.tolist(), plan.rank_of_rows().tolist()
    awaited = {source: rank_of[row] for row, source in enumerate(waits) if source >= 0}
    at, ends = plan.offsets[:-1].tolist(), plan.offsets[1:].tolist()
    done = [False] * len(waits)
    order: list[int] = []
    ready = list(range(plan.ranks))
    while ready:
        rank = ready.pop()
        while at[rank] < ends[rank]:
            row = at[rank]
            if waits[row] >= 0 and not done[waits[row]]:
                break  # the rank that computes the awaited row makes this one ready again
            order.append(row)
            done[row] = True
            at[rank] += 1
            if row in awaited:
                ready += (rank, awaited[row])
                break
    if len(order) < len(waits):  # never in a valid plan
        stuck = [(rank, row) for rank, row in enumerate(at) if row < ends[rank]]
        leaf = plan.rows.leaf
        raise DeadlockError(
            "no rank can go on"
            + "".join(f"\n  rank {r}: {leaf(row)} waits for {leaf(waits[row])}" for r, row in stuck)
        )
    return order
